#!/bin/sh
# Prints the path of a Python that can run this project, or says what to install.
#
#     sh .ci/find_python.sh          the newest tried Python among 3.12 and later
#     sh .ci/find_python.sh 3.12     that version and no other
#     PYTHON=/opt/py/bin/python3.13 sh .ci/find_python.sh     that one, or an error
#
# A name on PATH proves nothing: pyenv puts a `python3.13` there that exits 127 unless that version
# is selected, and a distribution may ship Python without `venv`. So each candidate is asked to run
# and to import what building a virtual environment needs.
set -u

wanted=${1:-}
tried=''

probe='
import sys
version, wanted = sys.version_info[:2], sys.argv[1]
if version < (3, 12) or (wanted and "%d.%d" % version != wanted):
    print("is %d.%d" % version)
    sys.exit(1)
try:
    import ensurepip, venv
except ImportError:
    print("is %d.%d but cannot build environments: its venv package is missing" % version)
    sys.exit(1)
print(sys.executable)
'

# Prints the path and ends the script if $1 is fit; notes the reason otherwise.
try_python() {
    answer=$("$1" -c "$probe" "$wanted" 2>/dev/null </dev/null)
    status=$?
    if [ "$status" -eq 0 ] && [ -n "$answer" ]; then
        printf '%s\n' "$answer"
        exit 0
    fi
    case $status in
        1) reason=${answer:-"does not run"} ;;
        127)
            reason='not found'
            command -v "$1" >/dev/null 2>&1 && reason='a shim on PATH with no Python behind it'
            ;;
        *) reason="does not run (exit $status)" ;;
    esac
    tried="$tried
    $1: $reason"
}

if [ -n "${PYTHON:-}" ]; then
    try_python "$PYTHON"
else
    # 3.13 is what the project is developed on, 3.12 the oldest it runs on.
    for name in python3.13 python3.12 python3 python3.14; do
        try_python "$name"
    done
    for minor in 13 12 14; do
        for path in "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/3.$minor"*/bin/python; do
            [ -x "$path" ] && try_python "$path"
        done
    done
fi

cat >&2 <<EOF
mimo_jax needs Python ${wanted:-3.12 or newer}, with its venv module. Tried:$tried

Install one, for example
    Debian 13, Ubuntu 24.04 or later:  apt-get install python3 python3-venv
    Fedora:                            dnf install python3.13
    macOS with Homebrew:               brew install python@3.13
    anywhere with pyenv:               pyenv install ${wanted:-3.13}
or name one you have:                  make setup PYTHON=/path/to/python3.13
EOF
exit 1
