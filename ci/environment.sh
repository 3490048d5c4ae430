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

# read_options NOUN CHOICE... -- ARGUMENT...: reads the arguments of a script that does several things. Sets $system for
# prepare_environment, $selected to the choices that --only names (without it, to all), and $options to what is left, which is for
# pytest. --help calls the script's own usage.
read_options() {
    local noun=$1 choices=()
    shift
    while [[ $1 != -- ]]; do
        choices+=("$1")
        shift
    done
    shift
    system=()
    selected=("${choices[@]}")
    options=()
    while [[ $# -gt 0 ]]; do
        case $1 in
            -h | --help)
                usage
                exit
                ;;
            --system) system+=(--system) ;;
            --only)
                select_choices "$noun" "${2:-}" "${choices[@]}"
                shift
                ;;
            --only=*) select_choices "$noun" "${1#--only=}" "${choices[@]}" ;;
            *) options+=("$1") ;;
        esac
        shift
    done
}

# select_choices NOUN LIST CHOICE...: sets $selected to the choices that a list names, separated by commas.
select_choices() {
    local noun=$1 list=$2 choice
    shift 2
    IFS=, read -ra selected <<<"$list"
    if [[ ${#selected[@]} == 0 ]]; then
        echo "--only needs ${noun}s, separated by commas: $*." >&2
        exit "$exit_usage"
    fi
    for choice in "${selected[@]}"; do
        if [[ " $* " != *" $choice "* ]]; then
            echo "--only: there is no $noun '$choice'; the ${noun}s are $*." >&2
            exit "$exit_usage"
        fi
    done
}
