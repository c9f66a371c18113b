#!/usr/bin/env bash
# check_needed.sh FILE...: fails if one of these libraries or programs needs a CUDA library to load.
set -euo pipefail
for file in "$@"; do
  needed=$(readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
  [ -n "$needed" ] || { echo "$file: readelf shows no NEEDED entries"; exit 1; }
  if grep -iE 'cuda|cudart|nccl|cublas|cudnn|nvrtc|nvidia|^libtitan_cuda' <<<"$needed"; then
    echo "$file needs the above, but only the plugin libtitan_cuda.so may need CUDA"
    exit 1
  fi
done
