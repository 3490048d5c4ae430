#!/usr/bin/env bash
# Runs the suite many times; see --help.
set -euo pipefail
# shellcheck source=ci/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'END'
bash ci/stress.sh [--system] [pytest options, tests...]

Prepares an environment and runs the suite in it: python -m pytest -n auto --count 500, with your options after these.
Yours win: with -n or --count of your own, ours is left out. Examples:

    bash ci/stress.sh --count 2000 --device sim
    bash ci/stress.sh --device cuda --load compute -k without_a_wait

The environment is .venv in the clone, made at the first run with the pinned packages of ci/requirements-cpu.txt and made
again when those change. Where python3 has a torch for an accelerator that is there, that torch is used instead.

    --system    use python3 as it is, make nothing
    --help      this text (python -m pytest --help lists the options of pytest and of the harness)

Environment: PYTHON (default python3) names the interpreter to start from; pip obeys its own PIP_* variables. Paths of tests
are relative to the root of the clone.

Exit status: pytest's. 0 clean, 1 race or failed test, 2 interrupted, 3 infrastructure, 4 usage, 5 nothing ran,
6 inconclusive.
END
}

system=()
options=()
workers=(-n auto)
count=(--count 500)
for argument in "$@"; do
    case $argument in
        -h | --help)
            usage
            exit
            ;;
        --system)
            system=(--system)
            continue
            ;;
        -n* | --numprocesses | --numprocesses=*) workers=() ;;
        --count | --count=*) count=() ;;
    esac
    options+=("$argument")
done

prepare_environment ${system[@]+"${system[@]}"}
cd "$root"
exec "$python" -m pytest ${workers[@]+"${workers[@]}"} ${count[@]+"${count[@]}"} ${options[@]+"${options[@]}"}
