#!/usr/bin/env bash
# virtual_gpus.sh N [--profile h100|h100_96gb|h200|b200|a100] -- PROGRAM ARGS...: runs the program with N virtual GPUs, see docs/virtual_gpu.md.
# Their libraries are those of the program's build folder, or else of build. They are made by: cmake --build build --target virtual_gpu
set -euo pipefail
usage() { sed -n '2s/^# //p' "$0" >&2; exit 2; }
[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || usage
export VIRTUAL_GPU_DEVICES=$1
shift
if [ "${1:-}" = --profile ]; then
  export VIRTUAL_GPU_PROFILE=${2:?the name of a profile}
  shift 2
fi
[ "${1:-}" = -- ] && [ $# -gt 1 ] || usage
shift
libraries=$(dirname "$(type -P "$1" || echo "$1")")/../virtual_gpu
[ -e "$libraries/libcudart.so.13" ] || libraries=$(dirname "$0")/../build/virtual_gpu
libraries=$(realpath -m "$libraries")
preload=
for library in cudart.so.13 cuda.so.1 nvidia-ml.so.1 nccl.so.2 cublas.so.13 cublasLt.so.13 cudnn.so.9 cusparse.so.12 cusparseLt.so.0 \
  cufft.so.12 curand.so.10 cufile.so.0 c_library.so titan_kernels.so; do
  # LibTorch's own code launches LibTorch's kernels, and LibTitan's own code LibTitan's: nothing is computed.
  [[ $library == titan_kernels.so && ${VIRTUAL_GPU_LIBTORCH:-0} != 0 ]] && continue
  [ -e "$libraries/lib$library" ] || { echo "virtual_gpus.sh: $libraries/lib$library is missing: cmake --build ${libraries%/*} --target virtual_gpu" >&2; exit 1; }
  preload+="$libraries/lib$library "
done
export VIRTUAL_GPU_KERNELS=$libraries/libkernels.so
# Processes write their faults here, and the program, which keeps this script's number, fails if there are any.
if [ "${VIRTUAL_GPU_RACES:-}" = fatal ] && [ -z "${VIRTUAL_GPU_FAULTS+set}" ]; then
  export VIRTUAL_GPU_FAULTS=$libraries/faults.$$
  rm -f "$VIRTUAL_GPU_FAULTS"
fi
LD_PRELOAD=${preload% } exec "$@"
