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
install() {
    "$python" -m uv pip install --quiet --python "$python" "$@" && return
    echo "uv could not install everything; trying pip, which takes longer"
    "$python" -m pip install --quiet "$@"
}
"$python" -m pip install --quiet uv || echo "uv cannot be had"
install --editable ".[$extras]" "$@"

# The GPU compiler for `python -m mimo_jax.plan`: into a folder of its own (see pyproject.toml), of
# the version of the jax beside it. Without it the plan compiles for the CPU and says so.
[ "$(uname -s)" = Linux ] || exit 0
jax_version=$("$python" -c 'from importlib.metadata import version; print(version("jax"))')
[ -d "$env_dir/aot/jax_cuda13_plugin-$jax_version.dist-info" ] && exit 0
rm -rf "$env_dir/aot"
wanted=$("$python" -c 'import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*(line.split(";")[0] for line in extras["aot"]))')
# shellcheck disable=SC2086  # one word per package
install --target "$env_dir/aot" $wanted \
    "jax-cuda13-plugin==$jax_version" "jax-cuda13-pjrt==$jax_version" \
    || echo "the GPU compiler could not be installed; python -m mimo_jax.plan will use the CPU"
