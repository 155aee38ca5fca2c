#!/usr/bin/env bash
# The steps by which the image is made, in the environment whose python comes first in PATH. They work outside
# of a container as well; run from the root of the repository.
#
#   install.sh dependencies cpu|cuda   what pyproject.toml asks for, in the versions of constraints.txt
#   install.sh package                 decodefleet itself, without looking at dependencies again
#   install.sh machine FOLDER          what a start would make otherwise: CPU kernels, and the proxy's command in FOLDER
#
# TORCH_CPU_INDEX: where `dependencies cpu` finds PyTorch's build without CUDA, such as a mirror of PyTorch's own index,
# from which nothing else is taken. Empty for the index of all other packages, whose build brings CUDA along.
set -euo pipefail

PIP=(python -m pip --disable-pip-version-check)
CONSTRAINTS=(--constraint deploy/constraints.txt)
TORCH_CPU_INDEX=${TORCH_CPU_INDEX-https://download.pytorch.org/whl/cpu}

scratch=$(mktemp --directory)
trap 'rm -rf "${scratch}"' EXIT

dependencies() {
  if [[ $1 == cpu && -n ${TORCH_CPU_INDEX} ]]; then
    "${PIP[@]}" install "${CONSTRAINTS[@]}" --no-deps --index-url "${TORCH_CPU_INDEX}" torch
  fi
  python - > "${scratch}/requirements.txt" <<'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], *project["optional-dependencies"]["otel"], sep="\n")
PYTHON
  "${PIP[@]}" install "${CONSTRAINTS[@]}" --requirement "${scratch}/requirements.txt"
}

package() {
  "${PIP[@]}" install "${CONSTRAINTS[@]}" "setuptools>=77"
  # or the wheel would also hold what an older build left there
  rm -rf build
  "${PIP[@]}" wheel --no-deps --no-build-isolation --wheel-dir "${scratch}" .
  "${PIP[@]}" install --no-deps --force-reinstall "${scratch}"/decodefleet-*.whl
}

machine() {
  local folder
  folder=$(realpath --canonicalize-missing "$1")
  # what is installed, not what lies here
  cd /
  python -c 'from decodefleet.kernels.cpu.native import prebuild; print(*prebuild(), sep="\n")'
  mkdir -p "${folder}"
  python -c 'import sys, pathlib; from decodefleet.cluster.http_proxy import prepare; print(prepare(pathlib.Path(sys.argv[1])))' "${folder}"
  # whoever runs it is not who made it
  chmod -R a+rX "${folder}"
  chmod a+x "${folder}/haproxy"
}

case ${1-} in
  dependencies | package | machine) "$@" ;;
  *)
    sed --quiet '2,/^$/ s/^#\( \|$\)//p' "$0" >&2
    exit 2
    ;;
esac
