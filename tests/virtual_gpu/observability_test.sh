#!/usr/bin/env bash
# observability_test.sh TITAN FOLDER [roofline]: what a run on GPUs says of itself; with roofline, the rest of the layouts' roofline reports.
set -euo pipefail
titan=$1 folder=$2 part=${3:-}
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

# The roofline report: the device's times, the limits of its data sheet, and NCCL's collectives.
report_roofline() {
  rm -rf "$folder/roofline"
  "$gpus" 2 -- "$titan" train "$config" --nproc 2 --report-roofline --job.dump_folder="$folder/roofline" --training.steps=4 \
    --model.args.n_layers=2 --training.local_batch_size=1 --training.seq_len=64 "$@" >"$folder/roofline.log" 2>&1 || failed "the report of '$*' fails:" "$folder/roofline.log"
  for text in "by the device's events; limits: .*989000 GFLOP/s in bfloat16.*3350 GB/s of memory (data sheet of Virtual H100" \
    "products bfloat16 " "attention bfloat16 " "norms .*bandwidth$" "exposed ms"; do
    grep -q -- "$text" "$folder/roofline.log" || failed "the report of '$*' has no '$text':" "$folder/roofline.log"
  done
  test -s "$folder/roofline/roofline.json" || failed "no roofline.json:" "$folder/roofline.log"
}
if [ "$part" = roofline ]; then
  report_roofline
  report_roofline --parallelism.tensor_parallel_degree=2
  exit
fi
report_roofline --parallelism.pipeline_parallel_degree=2 --training.local_batch_size=4

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

# Memory snapshots of LibTorch's allocator: its events lead to blocks that are there at the end, and PyTorch's viewer reads them.
"$gpus" 1 -- "$titan" train "$config" --nproc 1 --job.dump_folder="$folder/snapshot" --training.steps=2 --model.args.n_layers=1 --training.local_batch_size=1 \
  --training.seq_len=64 --profiling.enable_memory_snapshot --profiling.profile_freq=2 >"$folder/snapshot.log" 2>&1 || failed "the run with a memory snapshot fails:" "$folder/snapshot.log"
"$source_folder/.venv/bin/python" - "$folder"/snapshot/memory_snapshot/*/rank0_memory_snapshot.pickle <<'PYTHON' || failed "the memory snapshot:" "$folder/snapshot.log"
import pickle, sys
from torch.cuda import _memory_viz

(path,) = sys.argv[1:]
assert path.endswith("/iteration_2/rank0_memory_snapshot.pickle"), path
with open(path, "rb") as file:
    snapshot = pickle.load(file)
blocks = {}
for segment in snapshot["segments"]:
    assert segment["device"] == 0 and segment["is_expandable"], segment
    for block in segment["blocks"]:
        if block["state"] == "active_allocated":
            blocks[block["address"]] = block["requested_size"]
(trace,) = snapshot["device_traces"]
recorded = {}
for event in trace:
    if event["action"] == "alloc":
        recorded[event["addr"]] = event["size"]
    elif event["action"] == "free_requested":
        recorded.pop(event["addr"], None)
assert recorded and recorded.items() <= blocks.items(), recorded.items() - blocks.items()
names = {frame["name"] for event in trace for frame in event["frames"]}
assert any("titan::" in name for name in names), sorted(names)[:50]
print(len(trace), "events,", len(recorded), "blocks of", sum(recorded.values()), "bytes,", sum(blocks.values()), "in use")
for read in (_memory_viz.segsum, _memory_viz.trace, _memory_viz.trace_plot, _memory_viz.segment_plot):
    assert len(read(snapshot)) > 100, read
PYTHON

# A device that is nearly full: with a limit between what the first step and the second take, LibTorch's allocator flushes its cache, and the run goes
# on and says so.
train_near_limit() {
  VIRTUAL_GPU_MEMORY_ONLY=1 VIRTUAL_GPU_PROMPT=1 VIRTUAL_GPU_POISON=0 "$gpus" 1 -- "$titan" train "$config" --nproc 1 --job.dump_folder="$folder/$1" --training.steps="$2" \
    --model.args.n_layers=1 --training.local_batch_size=64 --training.seq_len=2048 --metrics.log_freq=1 >"$folder/$1.log" 2>&1 ||
    failed "the run '$1' fails:" "$folder/$1.log"
}
train_near_limit roomy 2
limit=$(python3 - "$folder/roomy/metrics.jsonl" <<'PYTHON'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
assert all(row["alloc_retries"] == 0 for row in rows), rows
first, second = (row["memory_percent"] for row in rows)
assert second > first, (first, second)
print((first + second) / 200)
PYTHON
)
PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:$limit train_near_limit tight 4
python3 -c '
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
retries = [row["alloc_retries"] for row in rows]
assert retries[0] == 0 < retries[-1] and retries == sorted(retries) and all(row["num_ooms"] == 0 for row in rows), rows
' "$folder/tight/metrics.jsonl" || failed "the metrics of a full device:" "$folder/tight.log"
grep -q "warning.*: the allocator of cuda:0 has flushed its cache [0-9]* times to find room, and 0 requests failed" "$folder/tight.log" ||
  failed "no warning of a full device:" "$folder/tight.log"
