#!/usr/bin/env bash
# check_cpu_only_torch.sh SOURCE TORCH: if TITAN_TORCH_DIR is a LibTorch without CUDA, the project configures and builds against it, and
# leaves the plugin out. The test uses TORCH without its CUDA libraries, laid out like an unpacked archive.
set -euo pipefail
source_dir=$1
torch=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/libtorch/lib"
ln -s "$torch/include" "$folder/libtorch/include"
[ ! -e "$torch/share" ] || ln -s "$torch/share" "$folder/libtorch/share"
for library in "$torch"/lib/*.so*; do
  case $(basename "$library") in
    *cuda*|*nvshmem*|*cudnn*|*nccl*) ;;
    *) ln -s "$library" "$folder/libtorch/lib/" ;;
  esac
done

cmake -S "$source_dir" -B "$folder/build" -G Ninja -DTITAN_TORCH_DIR="$folder/libtorch" -DTITAN_TESTS=OFF -DTITAN_PCH=OFF > "$folder/log" 2>&1 ||
  { cat "$folder/log"; exit 1; }
targets=$(cmake --build "$folder/build" --target help)
grep -q '^libtitan:' <<< "$targets" || { echo "no target libtitan"; exit 1; }
if grep -q '^titan_cuda:' <<< "$targets"; then
  echo "the plugin is built without a CUDA LibTorch"
  exit 1
fi
# Builds one layer that includes LibTorch's headers through the given folder.
cmake --build "$folder/build" --target titan_tensor > "$folder/log" 2>&1 || { tail -20 "$folder/log"; exit 1; }
