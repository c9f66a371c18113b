#!/usr/bin/env bash
# Makes a fresh Debian 12 ready: system packages, and .venv with LibTorch (the PyPI wheel torch==2.11.0 and its CUDA wheels).
# A second run finds everything in place and returns at once. With TITAN_TORCH_DIR set to an existing LibTorch (a `torch` folder of a
# Python environment, or an unpacked libtorch archive) no wheel is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

torch_version=2.11.0
packages=(g++ cmake ninja-build git pkg-config ccache mold python3 python3-venv
          libtomlplusplus-dev nlohmann-json3-dev libcli11-dev libspdlog-dev libfmt-dev libpcre2-dev
          libgtest-dev libgmock-dev libbenchmark-dev)

say() { printf 'bootstrap: %s\n' "$*" >&2; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

missing_packages() {
  local installed
  installed=$(dpkg-query -W -f='${Package} ${db:Status-Status}\n' "${packages[@]}" 2>/dev/null | awk '$2 == "installed" {print $1}')
  local package
  for package in "${packages[@]}"; do
    grep -qx "$package" <<<"$installed" || echo "$package"
  done
}

install_packages() {
  local missing
  missing=$(missing_packages)
  [ -n "$missing" ] || return 0
  if ! command -v apt-get >/dev/null; then
    say "these Debian packages are needed, and there is no apt-get to install them:" $missing
    exit 1
  fi
  say "installing" $missing
  as_root apt-get update -q
  # shellcheck disable=SC2086
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing
}

venv_torch_version() { cat .venv/lib/python3*/site-packages/torch/version.py 2>/dev/null | sed -n "s/^__version__ = '\([0-9.]*\).*/\1/p"; }

install_torch() {
  if [ -n "${TITAN_TORCH_DIR:-}" ]; then
    [ -e "$TITAN_TORCH_DIR/lib/libtorch_cpu.so" ] || { say "TITAN_TORCH_DIR=$TITAN_TORCH_DIR has no lib/libtorch_cpu.so"; exit 1; }
    return 0
  fi
  [ "$(venv_torch_version)" = "$torch_version" ] && [ -e .venv/.complete ] && return 0
  say "installing torch $torch_version into .venv (some GB)"
  [ -x .venv/bin/pip ] || /usr/bin/python3 -m venv .venv
  .venv/bin/pip install --quiet --disable-pip-version-check "torch==$torch_version" numpy
  touch .venv/.complete
}

install_packages
install_torch
