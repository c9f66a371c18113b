#!/usr/bin/env bash
# waits_test.sh TITAN FOLDER [ARGUMENT...]: each further step of a run on two virtual GPUs costs the host one wait for the device, for the numbers of
# the step before. A step that is logged costs no more, also while stragglers are looked for, and is logged when the work of the next step is queued.
set -euo pipefail
titan=$1 folder=$2
shift 2
cd "$(dirname "$0")/../.."  # paths in the config are relative to the working directory
# With PROMPT, whether an event is over when the host asks does not depend on the machine.
export VIRTUAL_GPU_RACES=fatal VIRTUAL_GPU_PROMPT=1 OMP_NUM_THREADS=1
rm -rf "$folder"
mkdir -p "$folder"
for freq in 1 100; do
  for steps in 4 8; do
    VIRTUAL_GPU_COUNTERS="$folder/$freq.$steps.%r.json" scripts/virtual_gpus.sh 2 -- "$titan" train configs/llama3_debug.toml --nproc=2 \
      --training.steps=$steps --lr_scheduler.total_steps=8 --training.seq_len=64 --training.local_batch_size=1 --model.args.n_layers=1 \
      --metrics.log_freq=$freq --job.dump_folder="$folder/$freq.$steps" "$@" >"$folder/log" 2>&1 ||
      { echo "the run of $steps steps fails:"; tail -n 40 "$folder/log"; exit 1; }
  done
done
# Prints each operation that a single rank queues.
VIRTUAL_GPU_TRACE=1 scripts/virtual_gpus.sh 1 -- "$titan" train configs/llama3_debug.toml --nproc=1 --training.steps=8 --training.seq_len=64 \
  --training.local_batch_size=1 --model.args.n_layers=1 --metrics.log_freq=1 --job.dump_folder="$folder/traced" "$@" >"$folder/trace" 2>&1 ||
  { echo "the run with a trace fails:"; tail -n 40 "$folder/trace"; exit 1; }
python3 - "$folder" <<'PYTHON'
import collections, json, pathlib, re, sys
folder, failed = pathlib.Path(sys.argv[1]), False
def waits(freq, steps, rank):
    total = collections.Counter()
    for operations in json.loads((folder / f"{freq}.{steps}.{rank}.json").read_text()).values():
        total.update({call: count["host_waits"] for call, count in operations.items() if "host_waits" in count})
    return dict(total)
def rows(freq, steps):
    return [json.loads(line) for line in (folder / f"{freq}.{steps}" / "metrics.jsonl").read_text().splitlines()]
for rank in (0, 1):
    all_waits = {(freq, steps): waits(freq, steps, rank) for freq in (1, 100) for steps in (4, 8)}
    totals = {run: sum(calls.values()) for run, calls in all_waits.items()}
    print(f"rank {rank}: waits by (log_freq, steps): {all_waits}")
    failed |= any(totals[freq, 8] - totals[freq, 4] != 4 for freq in (1, 100)) or totals[1, 8] != totals[100, 8]
for steps in (4, 8):
    logged = [row["step"] for row in rows(1, steps)]
    if logged != list(range(1, steps + 1)) or [row["step"] for row in rows(100, steps)] != [1]:
        print(f"these steps of {steps} are logged: {logged}")
        failed = True
# A step's last operations join its numbers and copy them to the host.
sent, queued, before = 0, [], ""  # how many steps are queued before each step's line
for line in (folder / "trace").read_text().splitlines():
    sent += before.endswith("aten::cat") and line.endswith("cudaMemcpyAsync")
    before = line
    if re.search(r" step: +[0-9]+ ", line):
        queued.append(sent)
# The first step isn't late, and none follows the last.
if queued != [1, 3, 4, 5, 6, 7, 8, 8]:
    print(f"the lines of steps 1 to 8 come after so many steps were queued: {queued}")
    failed = True
if failed:
    sys.exit("each further step should cost a rank one wait for its device, logged or not")
PYTHON
