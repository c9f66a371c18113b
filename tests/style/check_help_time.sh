#!/usr/bin/env bash
# check_help_time.sh TITAN: `titan train --help` ends within 0.3 s, as the best of five; on a machine where loading LibTorch alone takes
# longer, within 60 ms of that.
set -euo pipefail

best_ms() {
  local best=1000000 start took
  for _ in 1 2 3 4 5; do
    start=$(date +%s%N)
    "$@" > /dev/null
    took=$((($(date +%s%N) - start) / 1000000))
    [ "$took" -ge "$best" ] || best=$took
  done
  echo "$best"
}

help=$("$1" train --help)
# All of it, though the program leaves in a hurry.
for key in --nproc --training.steps --debug.deterministic_warn_only; do
  grep -qe "$key" <<<"$help" || { echo "the help lacks $key"; exit 1; }
done

help_ms=$(best_ms "$1" train --help)
echo "best of five: $help_ms ms"
[ "$help_ms" -gt 300 ] || exit 0
torch=$(ldd "$1" | awk '/libtorch_cpu/ { print $3 }')
torch_ms=$(best_ms env LD_PRELOAD="$torch" true)
echo "loading LibTorch alone: $torch_ms ms"
[ "$help_ms" -le $((torch_ms + 60)) ]
