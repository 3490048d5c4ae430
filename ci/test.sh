#!/usr/bin/env bash
# Checks everything that a machine without an accelerator can check; see --help.
set -euo pipefail
# shellcheck source=ci/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

suite_count=40
parts=(ruff format mypy harness canary suite twins)

usage() {
    cat <<END
bash ci/test.sh [--system] [--only PART[,PART...]] [pytest options]

Prepares an environment and runs, each whatever became of the one before:

    ruff       ruff check
    format     ruff format --check
    mypy       mypy
    harness    the harness's own tests: pytest harness/tests, with your pytest options
    canary     planted races, each of which must be found, or the rest proves nothing: harness canary --device sim
    suite      the suite on the simulated accelerator: pytest --count $suite_count --device sim
    twins      the suite's power on it: every synchronization left out, one at a time: harness twins --device sim

A table at the end names what failed; the closing lines of both pytest runs come last.

    --only      run these parts alone
    --system    use python3 as it is, make no environment (ci/stress.sh --help says more about environments)
    --help      this text

Exit status: 0 if all passed, else that of the first part that failed; 2 if interrupted, 4 for bad options.
END
}

read_options part "${parts[@]}" -- "$@"
prepare_environment --development ${system[@]+"${system[@]}"}
cd "$root"
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
trap 'exit 2' INT TERM

table=()
closing_lines=()
status=0

# run_part NAME ARGUMENTS...: runs python -m ARGUMENTS and keeps a row for the table.
run_part() {
    local name=$1 code=0 started=$SECONDS closing verdict=passed
    shift
    [[ " ${selected[*]} " == *" $name "* ]] || return 0
    printf '\n== %s: python -m %s\n' "$name" "$*"
    "$python" -m "$@" 2>&1 9>&- | tee -i "$logs/$name" || code=${PIPESTATUS[0]}
    if [[ $code != 0 ]]; then
        verdict="FAILED (exit $code)"
        [[ $status != 0 ]] || status=$code
    fi
    closing=$(grep -v '^[[:space:]]*$' "$logs/$name" | tail -n 1) || closing=
    table+=("$(printf '%-8s %-17s %4d s   %s' "$name" "$verdict" $((SECONDS - started)) "$(sed -E 's/^=+ | =+$//g' <<<"$closing")")")
    [[ $1 != pytest ]] || closing_lines+=("$closing")
}

run_part ruff ruff check .
run_part format ruff format --check .
run_part mypy mypy
run_part harness pytest harness/tests -n auto --dist worksteal ${options[@]+"${options[@]}"}
run_part canary harness canary --device sim
run_part suite pytest -n auto --count "$suite_count" --device sim
run_part twins harness twins --device sim -n auto

printf '\n'
printf '%s\n' "${table[@]}"
[[ ${#closing_lines[@]} == 0 ]] || printf '%s\n' "${closing_lines[@]}"
exit "$status"
