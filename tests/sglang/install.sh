#!/usr/bin/env bash
# A real SGLang server for machines without a GPU, in an environment of its own, which `.venv-sglang` then points to.
#   tests/sglang/install.sh [LINK]        about 2 minutes and 3 GB; nothing at all where the cache has it already
# It is kept under a name that follows from what goes into it, so that a changed file makes a fresh one.
set -euo pipefail
cd "$(dirname "$0")"
link=${1:-../../.venv-sglang}
python=${PYTHON:-python3}
name=$(cat requirements.txt install.sh shims/*.p* shims/*/*.py "$(command -v "$python")" | sha256sum | cut -c1-16)
environment=${XDG_CACHE_HOME:-$HOME/.cache}/areal_rloo/sglang-$name

if [ ! -e "$environment/.complete" ]; then
    rm -rf "$environment"
    "$python" -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.txt
    cp -r shims/. "$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    touch "$environment/.complete"
fi
ln -sfn "$environment" "$link"
