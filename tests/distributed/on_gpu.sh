#!/usr/bin/env bash
# on_gpu.sh COMMAND...: runs it if as many GPUs are visible as TITAN_TEST_GPUS says (default: 1), also virtual ones (scripts/virtual_gpus.sh);
# otherwise prints that and exits with 77, so that ctest counts the test as skipped.
gpus=${VIRTUAL_GPU_DEVICES:-$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)}
[ "${CUDA_VISIBLE_DEVICES-all}" != "" ] || gpus=0
if [ "$gpus" -lt "${TITAN_TEST_GPUS-1}" ]; then
  echo "skipped: ${TITAN_TEST_GPUS-1} GPUs are needed, and $gpus are visible"
  exit 77
fi
exec "$@"
