#!/usr/bin/env bash
# Checks decodefleet on one GPU machine in under eight minutes: kernel tests, kernel benchmark, exactness, and
# the engine with random weights in the shape of Llama 3 8B. Needs torch >= 2.11, triton >= 3.6, transformers 5
# and what an engine imports (msgspec, psutil, pydantic, pytest, safetensors, ...); neither Ray nor a model nor
# the network.
#
#   deploy/gpu_check.sh [--device cuda|cpu] [--tiny] [--only PART ...]
#
# Results: $OUT/gpu_check.json and $OUT/gpu_check.txt (OUT: ./gpu_check_out). Missing Python packages are
# installed beside them, from the wheels in $WHEELS where that is set. PYTHON chooses the interpreter.
set -uo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
out="${OUT:-$PWD/gpu_check_out}"
site="$out/site"

mkdir -p "$out"
export PYTHONPATH="$root/.pyroot:$site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1

missing=""
for package in filelock gguf hypothesis jinja2 msgspec numpy psutil pydantic pytest pytest-asyncio pytest-timeout \
    safetensors tokenizers transformers; do
    module="${package//-/_}"
    "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" ||
        missing="$missing $package"
done
if [ -n "$missing" ]; then
    echo "installing:$missing"
    # shellcheck disable=SC2086
    "$python" -m pip install --quiet --target "$site" \
        ${WHEELS:+--no-index --find-links "$WHEELS"} $missing || echo "some packages could not be installed"
fi

cd "$root" || exit 1
exec "$python" deploy/gpu_check/check.py --out "$out" "$@"
