#!/bin/sh
# Builds a virtual environment that holds this project, editable, with its test tools.
#
#     sh .ci/setup_env.sh .venv                                 what `make setup` runs
#     sh .ci/setup_env.sh .cache/venv-oldest 3.12 jax==0.11.2   another Python, other versions
#
# An environment that works is kept and brought up to date; a broken or too old one is replaced.
set -eu
cd "$(dirname "$0")/.."
env_dir=$1
version=${2:-}
[ "$#" -lt 2 ] && shift 1 || shift 2
python=$env_dir/bin/python

if ! "$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
    found=$(sh .ci/find_python.sh "$version")
    echo "building $env_dir with $found"
    "$found" -m venv --clear "$env_dir"
fi

# pyright runs on Node: bring it as a package where the machine has none.
extras=test
command -v node >/dev/null 2>&1 || extras=test,node

# uv installs several times faster than pip; where it cannot be had, or fails, pip does the same.
# Both trust the system's certificates, which a company's proxy may need.
export PIP_DISABLE_PIP_VERSION_CHECK=1 UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"
if "$python" -m pip install --quiet uv \
    && "$python" -m uv pip install --quiet --python "$python" --editable ".[$extras]" "$@"; then
    exit 0
fi
echo "uv could not install everything; trying pip, which takes longer"
"$python" -m pip install --quiet --editable ".[$extras]" "$@"
