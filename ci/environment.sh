# shellcheck shell=bash
# Sourced by the scripts beside it: prepare_environment sets $python to the interpreter to use (see environment.py).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

# Exit codes as in harness/exit_codes.py.
exit_infrastructure=3
exit_usage=4

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

# Prints a Python of 3.10 or newer: $PYTHON if set, else the first of the usual names.
find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        if ! is_new_enough "$PYTHON"; then
            echo "PYTHON=$PYTHON is not a Python 3.10 or newer ($("$PYTHON" --version 2>&1 | tail -n 1)); set it to one, or unset it." >&2
            return "$exit_usage"
        fi
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "No Python 3.10 or newer is on PATH; install one (Debian, Ubuntu: apt-get install python3 python3-venv), or set PYTHON to one." >&2
    return "$exit_usage"
}

# prepare_environment [--system] [--development]
prepare_environment() {
    local base
    base=$(find_python) || exit
    case " $* " in
        *" --system "*) ;;
        *)
            # The lock lies on this open file, for as long as this script, and what it starts, keeps it open.
            if ! { mkdir -p "$root/.sidestream" && exec 9>>"$root/.sidestream/environment.lock"; } 2>/dev/null; then
                echo "$root cannot be written, so no environment can be made there; use --system, or a clone of your own." >&2
                exit "$exit_usage"
            fi
            set -- "$@" --lock-descriptor 9
            ;;
    esac
    python=$("$base" "$root/ci/environment.py" "$@") || exit
    if [[ ! -x $python ]]; then
        echo "ci/environment.py found no Python." >&2
        exit "$exit_infrastructure"
    fi
}
