#!/usr/bin/env bash
# check_help_time.sh TITAN: the fastest of up to twenty runs of `titan train --help` takes at most 0.3 s or, on a slow machine, at most 60 ms
# more than loading LibTorch alone. The two are measured alternately until the limit is met.
set -euo pipefail

# took_ms COMMAND...
took_ms() {
  local start
  start=$(date +%s%N)
  "$@" > /dev/null
  echo $((($(date +%s%N) - start) / 1000000))
}

help=$("$1" train --help)
# The output is complete, although the program exits without cleaning up.
for key in --nproc --training.steps --debug.deterministic_warn_only; do
  grep -qe "$key" <<<"$help" || { echo "the help lacks $key"; exit 1; }
done

torch=$(ldd "$1" | awk '/libtorch_cpu/ { print $3 }')
help_ms=1000000
torch_ms=1000000
for _ in {1..20}; do
  took=$(took_ms "$1" train --help)
  [ "$took" -ge "$help_ms" ] || help_ms=$took
  if [ "$help_ms" -le 300 ]; then echo "best: $help_ms ms"; exit 0; fi
  took=$(took_ms env LD_PRELOAD="$torch" true)
  [ "$took" -ge "$torch_ms" ] || torch_ms=$took
  if [ "$help_ms" -le $((torch_ms + 60)) ]; then echo "best: $help_ms ms, loading LibTorch alone $torch_ms ms"; exit 0; fi
done
echo "best of twenty: $help_ms ms, loading LibTorch alone: $torch_ms ms"
exit 1
