#!/usr/bin/env bash
# profiles_test.sh VIRTUAL_GPU_TEST TITAN FOLDER: each profile has its properties, and trains one block of the debug recipe.
set -euo pipefail
test=$1 titan=$2 folder=$3
source_folder=$(cd "$(dirname "$0")/../.." && pwd)
export VIRTUAL_GPU_RACES=fatal OMP_NUM_THREADS=1
rm -rf "$folder"
mkdir -p "$folder"
cd "$source_folder"  # paths in the config are relative to the working directory
run() {
  scripts/virtual_gpus.sh 1 --profile "$@" >"$folder/log" 2>&1 || { echo "$1 fails:"; tail -n 40 "$folder/log"; exit 1; }
}
for profile in a100 h100 h100_96gb h200 b200; do
  run $profile -- "$test" --gtest_filter=Profile.*
  run $profile -- "$titan" train configs/llama3_debug.toml --nproc=1 --training.steps=2 --training.seq_len=64 --training.local_batch_size=1 \
    --model.args.n_layers=1 --job.dump_folder="$folder/run"
  grep -q "step: *2 .*loss" "$folder/log" || { echo "$profile doesn't train:"; tail -n 40 "$folder/log"; exit 1; }
  rm -rf "$folder/run"
done
if scripts/virtual_gpus.sh 1 --profile h900 -- "$test" --gtest_filter=Profile.* >"$folder/log" 2>&1 || ! grep -q "the profile 'h900'.*Profiles are: a100, " "$folder/log"; then
  echo "a profile that doesn't exist isn't refused:"
  tail -n 40 "$folder/log"
  exit 1
fi
