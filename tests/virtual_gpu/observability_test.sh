#!/usr/bin/env bash
# observability_test.sh TITAN FOLDER: what a run on GPUs says of itself.
set -euo pipefail
titan=$1 folder=$2
source_folder=$(cd "$(dirname "$0")/../.." && pwd)
gpus=$source_folder/scripts/virtual_gpus.sh
config=$source_folder/configs/llama3_debug.toml
export VIRTUAL_GPU_RACES=fatal OMP_NUM_THREADS=1
rm -rf "$folder"
mkdir -p "$folder"
cd "$source_folder"  # paths in the config are relative to the working directory
failed() {
  echo "$1"
  shift
  tail -n 60 "$@"
  exit 1
}

# Three ranks train over NCCL, and the operations of one are late. Though no host waits for a collective, the run and `titan top` name that
# rank, by the times of its device.
slow_rank='[ "$RANK" != 1 ] || export VIRTUAL_GPU_DELAY_US=5000
exec "$0" "$@"'
"$gpus" 3 -- "$titan" launch -n 3 -- bash -c "$slow_rank" "$titan" train "$config" --job.dump_folder="$folder/slow" --training.steps=6 \
  --model.args.n_layers=1 --training.local_batch_size=1 --training.seq_len=64 \
  --metrics.log_freq=1 --metrics.structured_logs.enable >"$folder/slow.log" 2>&1 ||
  failed "the run with a slow rank fails:" "$folder/slow.log"
"$titan" top "$folder/slow" --once >"$folder/top"
if ! grep -q "rank 1 ([^)]*) holds the others up: " "$folder/slow.log" || ! grep -Eq "^ *1 .*slowest" "$folder/top"; then
  failed "the slow rank isn't named:" "$folder/slow.log" "$folder/top"
fi

# A batch that no GPU holds: the report has the computed sizes and the allocator's blocks side by side.
status=0
VIRTUAL_GPU_MEMORY_ONLY=1 "$gpus" 1 -- "$titan" train "$config" --nproc 1 --job.dump_folder="$folder/full" --training.local_batch_size=4096 \
  --training.seq_len=2048 >"$folder/full.log" 2>&1 || status=$?
for text in "out of memory on cuda:0" "computed  *in use" "^.*parameters  *[0-9.]* GiB  *[0-9.]* GiB" "all other blocks  *-  *[0-9.]* GiB"; do
  grep -q -- "$text" "$folder/full.log" || failed "the report of memory has no '$text' (exit code $status):" "$folder/full.log"
done

# The roofline report: the device's times, the limits of its data sheet, and NCCL's collectives, for FSDP, tensor parallelism and a pipeline.
for layout in "" --parallelism.tensor_parallel_degree=2 "--parallelism.pipeline_parallel_degree=2 --training.local_batch_size=4"; do
  "$gpus" 2 -- "$titan" train "$config" --nproc 2 --report-roofline --job.dump_folder="$folder/roofline" --training.steps=4 \
    --model.args.n_layers=2 --training.local_batch_size=1 --training.seq_len=64 $layout >"$folder/roofline.log" 2>&1 || failed "the report of '$layout' fails:" "$folder/roofline.log"
  for text in "by the device's events; limits: .*989000 GFLOP/s in bfloat16.*3350 GB/s of memory (data sheet of Virtual H100" \
    "products bfloat16 " "attention bfloat16 " "norms .*bandwidth$" "exposed ms"; do
    grep -q -- "$text" "$folder/roofline.log" || failed "the report of '$layout' has no '$text':" "$folder/roofline.log"
  done
  test -s "$folder/roofline/roofline.json" || failed "no roofline.json:" "$folder/roofline.log"
  rm -rf "$folder/roofline"
done
