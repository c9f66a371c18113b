#!/usr/bin/env bash
# Checks how many ranks scripts/train.sh starts, in a copy with a fake build, titan and GPUs.
set -euo pipefail
source_root=$1
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{scripts,build/bin,build/lib,tools}
cp "$source_root/scripts/train.sh" "$root/scripts/"

stub() { printf '#!/bin/sh\n%s\n' "$2" >"$1" && chmod +x "$1"; }
stub "$root/scripts/build.sh" 'exit 0'
stub "$root/build/bin/titan" 'echo "$@"'
stub "$root/tools/nvidia-smi" 'echo "GPU 0: one"; echo "GPU 1: two"; echo "GPU 2: three"'
stub "$root/tools/ninja" 'exit 0'
export PATH="$root/tools:$PATH"
unset NPROC

expect() {
  local got
  got=$("$root/scripts/train.sh" a.toml --training.steps 5)
  [ "$got" = "train --nproc $1 a.toml --training.steps 5" ] || { echo "$2: expected $1 ranks, got: $got"; exit 1; }
}
expect 2 "GPUs, but no plugin"
touch "$root/build/lib/libtitan_cuda.so"
expect 3 "GPUs and the plugin"
NPROC=5 expect 5 "NPROC"
stub "$root/tools/nvidia-smi" 'exit 9'
expect 2 "no GPU"
