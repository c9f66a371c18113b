#!/usr/bin/env bash
# on_gpu.sh COMMAND...: runs it if a GPU is visible, or as many as TITAN_TEST_GPUS says; otherwise prints that and exits with 77, so that
# ctest counts the test as skipped.
if [ ! -e /dev/nvidia0 ] || [ "${CUDA_VISIBLE_DEVICES-all}" = "" ]; then
  echo "skipped: no GPU is visible"
  exit 77
fi
if [ "$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)" -lt "${TITAN_TEST_GPUS-1}" ]; then
  echo "skipped: fewer than $TITAN_TEST_GPUS GPUs"
  exit 77
fi
exec "$@"
