#!/usr/bin/env bash
# train.sh CONFIG [--section.key value ...]: sets up, builds, and trains with one rank per GPU, or with two CPU ranks.
# NPROC=n sets another number of ranks.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -ge 1 ] || { echo "usage: scripts/train.sh CONFIG [--section.key value ...]" >&2; exit 2; }
"$root/scripts/build.sh" titan

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
has_plugin_target() { (cd "$root" && ninja -C build -t targets all | grep -q '^lib/libtitan_cuda.so'); }
if [ "$gpus" -gt 0 ] && has_plugin_target; then "$root/scripts/build.sh" titan_cuda; fi
# Without the plugin (no nvcc, or a LibTorch without CUDA) ranks compute on the CPU, so GPUs aren't counted; titan logs a warning.
[ -e "$root/build/lib/libtitan_cuda.so" ] || gpus=0

nproc_=${NPROC:-$gpus}
[ "$nproc_" -gt 0 ] || nproc_=2
exec "$root/build/bin/titan" train --nproc "$nproc_" "$@"
