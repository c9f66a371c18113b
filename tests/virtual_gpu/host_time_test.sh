#!/usr/bin/env bash
# host_time_test.sh HOST_TIME_BENCH: the host's part of a block in bf16, as one of two ranks, takes LibTitan at most half of PyTorch FSDP2's time.
# Other processes only make a repetition longer, so the least one of each side counts, of up to three alternating runs.
set -euo pipefail
cd "$(dirname "$0")/../.."
least_of() { # BEFORE COMMAND...
  local before=$1 now
  shift
  now=$(scripts/virtual_gpus.sh 1 -- "$@" --dtype bf16 --ranks 2 --device cuda 2>/dev/null | sed -n 's/.*"least_us_per_block": \([0-9.]*\).*/\1/p')
  printf '%s\n' $before "${now:?no time}" | sort -g | head -n 1
}
ours= pytorchs=
for _ in 1 2 3; do
  ours=$(least_of "$ours" "$1")
  pytorchs=$(least_of "$pytorchs" .venv/bin/python benchmarks/pytorch/host_time.py)
  echo "least host time of a block: LibTitan $ours µs, PyTorch $pytorchs µs"
  awk "BEGIN { exit !($ours <= 0.5 * $pytorchs) }" && exit 0
done
echo "LibTitan's host takes more than half of PyTorch's time"
exit 1
