#!/usr/bin/env bash
# The steps by which the image is made, in the environment whose python comes first in PATH. They work outside
# of a container as well; run from the root of the repository.
#
#   install.sh dependencies cpu|cuda   what pyproject.toml asks for, in the versions of constraints.txt
#   install.sh package                 decodefleet itself, without looking at dependencies again
#   install.sh machine FOLDER          what a start would make otherwise: CPU kernels, and the proxy's command in FOLDER
set -euo pipefail

PIP=(python -m pip install --disable-pip-version-check --no-cache-dir)
CONSTRAINTS=(--constraint deploy/constraints.txt)

dependencies() {
  local index=()
  # PyTorch's own index has a build without CUDA; elsewhere the same version brings it along
  if [[ $1 == cpu ]]; then index=(--extra-index-url https://download.pytorch.org/whl/cpu); fi
  python - > /tmp/requirements.txt <<'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], *project["optional-dependencies"]["otel"], sep="\n")
PYTHON
  "${PIP[@]}" "${CONSTRAINTS[@]}" "${index[@]}" --requirement /tmp/requirements.txt
}

package() {
  "${PIP[@]}" "${CONSTRAINTS[@]}" "setuptools>=77"
  python -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir /tmp/wheels .
  "${PIP[@]}" --no-deps /tmp/wheels/decodefleet-*.whl
}

machine() {
  cd /
  python -c 'from decodefleet.kernels.cpu.native import prebuild; print(*prebuild(), sep="\n")'
  mkdir -p "$1"
  python -c 'import sys, pathlib; from decodefleet.cluster.http_proxy import prepare; print(prepare(pathlib.Path(sys.argv[1])))' "$1"
  # whoever runs it is not who made it
  chmod -R a+rX "$1"
  chmod a+x "$1/haproxy"
}

"$@"
