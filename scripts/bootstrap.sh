#!/usr/bin/env bash
# Prepares a fresh Debian 12: installs system packages, and LibTorch in .venv (the PyPI wheel torch==2.11.0 and its CUDA wheels).
# A second run finds everything installed and returns at once. If TITAN_TORCH_DIR names an existing LibTorch (the `torch` folder of a
# Python environment, or an unpacked libtorch archive), no wheel is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

# The program needs torch; tests that compare with Python need the others.
python_packages=(torch==2.11.0 numpy tokenizers tensorboard safetensors torchao==0.17.0)
packages=(g++ cmake ninja-build git pkg-config ccache mold python3 python3-venv
          libtomlplusplus-dev nlohmann-json3-dev libspdlog-dev libfmt-dev libpcre2-dev libxxhash-dev zlib1g-dev
          libcli11-dev
          libgtest-dev libgmock-dev)

say() { printf 'bootstrap: %s\n' "$*" >&2; }
source scripts/packages.sh

have_venv_torch() { compgen -G '.venv/lib/python3*/site-packages/torch/lib/libtorch_cpu.so' >/dev/null; }

install_torch() {
  if [ -n "${TITAN_TORCH_DIR:-}" ]; then
    [ -e "$TITAN_TORCH_DIR/lib/libtorch_cpu.so" ] || { say "TITAN_TORCH_DIR=$TITAN_TORCH_DIR has no lib/libtorch_cpu.so"; exit 1; }
    return 0
  fi
  # Written last, so that an interrupted installation is resumed.
  local stamp=.venv/.complete
  [ "$(cat $stamp 2>/dev/null)" = "${python_packages[*]}" ] && have_venv_torch && return 0
  say "installing ${python_packages[*]} into .venv (several GB)"
  [ -x .venv/bin/pip ] || /usr/bin/python3 -m venv .venv
  # Python compiles modules when it imports them; compiling all of them here would take 15 s.
  .venv/bin/pip install --quiet --disable-pip-version-check --no-compile "${python_packages[@]}"
  echo "${python_packages[*]}" >$stamp
}

install_packages "${packages[@]}"
install_torch
