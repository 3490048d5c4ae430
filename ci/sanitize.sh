#!/usr/bin/env bash
# Runs the simulator's tests under the compiler's sanitizers; see --help.
set -euo pipefail
# shellcheck source=ci/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

runs=(address undefined thread)

usage() {
    cat <<'END'
bash ci/sanitize.sh [--system] [--only RUN[,RUN]] [pytest options]

Builds the simulated accelerator with the compiler's sanitizers and runs its tests, the conformance tests among them:

    address      AddressSanitizer
    undefined    UndefinedBehaviorSanitizer
    thread       ThreadSanitizer

Each run first has to report a defect that is planted in an extension of its own (ci/planted_defects.cpp). Then a report fails
the run if a frame of it lies in the simulator: PyTorch and Python are not built with sanitizers, so what is reported of them
alone says nothing. Builds are cached beside the usual ones; a build takes a minute or two, and so does a run.

    --only      make this run alone
    --system    use python3 as it is, make no environment (ci/stress.sh --help says more about environments)
    --help      this text

Environment: CXX names the compiler, which must be a GCC with the libraries of its sanitizers.

Exit status: 0 if all is clean, 1 after a report or a failed test, 2 interrupted, 3 infrastructure (a planted defect was not
reported), 4 bad options or no sanitizers.
END
}

read_options run "${runs[@]}" -- "$@"
prepare_environment --development ${system[@]+"${system[@]}"}
cd "$root"
# The interpreter itself: what starts it may be a shell script, and shells do not bear a preloaded sanitizer.
python=$("$python" -c 'import sys; print(sys.executable)')
compiler=$("$python" -c 'from harness.backends.toolchain import find_compiler; print(find_compiler())')

# library NAME: prints the path of a shared library of the compiler's.
library() {
    local path
    # Not quoted: CXX may name a launcher and a compiler.
    path=$($compiler -print-file-name="$1")
    if [[ $path != /* ]]; then
        echo "The compiler $compiler has no $1, which the sanitizers need: install it (Debian, Ubuntu: apt-get install g++; Fedora: dnf install libasan libubsan libtsan), or set CXX to a GCC that has it." >&2
        exit "$exit_usage"
    fi
    printf '%s\n' "$path"
}

declare -A runtimes=([address]=libasan.so [undefined]=libubsan.so [thread]=libtsan.so)
declare -A defects=([address]=heap-overflow [undefined]=signed-overflow [thread]=data-race)
declare -A preloaded=()
# Python does not load libstdc++ by itself, and AddressSanitizer looks for the functions that throw when the process starts.
standard_library=$(library libstdc++.so.6)
for run in "${selected[@]}"; do
    runtime=$(library "${runtimes[$run]}")
    preloaded[$run]="$runtime $standard_library"
done

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
trap 'exit 2' INT TERM

# Frames of reports name the library that they lie in, wherever debug information names the source as well.
frames="stack_trace_format='    #%n %p in %f %S (%m+%o)'"

# with_sanitizer RUN FOLDER COMMAND...: runs a command that writes its reports to files in a folder.
with_sanitizer() {
    local run=$1 log="log_path=$2/report"
    mkdir -p "$2"
    shift 2
    # No leaks: Python and PyTorch keep much to the end of the process, and the simulator its singletons, on purpose.
    # An allocation that cannot be had is null, as without sanitizers: the tests ask for some.
    env SIDESTREAM_SANITIZER="$run" LD_PRELOAD="${preloaded[$run]}" \
        ASAN_OPTIONS="detect_leaks=0:halt_on_error=0:allocator_may_return_null=1:$log:$frames" \
        UBSAN_OPTIONS="print_stacktrace=1:$log:$frames" \
        TSAN_OPTIONS="exitcode=0:history_size=4:allocator_may_return_null=1:suppressions=$root/ci/thread_sanitizer_suppressions.txt:$log:$frames" \
        "$@"
}

# The tests of the simulator, without one that measures the memory and the time of the process, which are the sanitizers' here.
tests=(
    harness/tests/device harness/tests/test_simulator_*.py
    --deselect harness/tests/test_simulator_scheduler.py::test_repetitions_neither_slow_down_nor_grow
)

status=0
for run in "${selected[@]}"; do
    printf '\n== %s\n' "$run"
    with_sanitizer "$run" "$reports/planted-$run" "$python" ci/plant_defect.py "${defects[$run]}"
    found=0
    "$python" ci/sanitizer_reports.py "$reports/planted-$run" >"$reports/of-planted" || found=$?
    if [[ $found != 10 ]]; then
        cat "$reports/of-planted"
        echo "The sanitizer did not report the planted defect, ${defects[$run]}, so that a clean run would say nothing." >&2
        exit "$exit_infrastructure"
    fi
    echo "The planted defect is reported: ${defects[$run]}"
    with_sanitizer "$run" "$reports/$run" \
        "$python" -m pytest --device sim -p no:cacheprovider "${tests[@]}" ${options[@]+"${options[@]}"} || status=1
    "$python" ci/sanitizer_reports.py "$reports/$run" || status=1
done
exit "$status"
