#!/usr/bin/env bash
# A real vLLM server for machines without a GPU, in an environment of its own, which `.venv-vllm` then points to.
#   tests/vllm/install.sh [LINK]          about 2 minutes and 2 GB; nothing at all where the cache has it already
# It is kept under a name that follows from what goes into it, so that a changed file makes a fresh one.
set -euo pipefail
cd "$(dirname "$0")"
link=${1:-../../.venv-vllm}
python=${PYTHON:-python3}
name=$(cat requirements.txt install.sh shims/*.p* shims/*/METADATA "$(command -v "$python")" | sha256sum | cut -c1-16)
environment=${XDG_CACHE_HOME:-$HOME/.cache}/areal_rloo/vllm-$name

if [ ! -e "$environment/.complete" ]; then
    rm -rf "$environment"
    "$python" -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.txt
    cp -r shims/. "$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    touch "$environment/.complete"
fi
ln -sfn "$environment" "$link"
