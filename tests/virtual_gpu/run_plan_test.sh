#!/usr/bin/env bash
# run_plan_test.sh TITAN HELD_STEP FOLDER: titan train plans its own run on GPUs, and compares itself with the plan.
set -euo pipefail
titan=$1 held_step=$2 folder=$3
source_folder=$(cd "$(dirname "$0")/../.." && pwd)
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
train=(scripts/virtual_gpus.sh 2 -- "$titan" train configs/llama3_debug.toml --nproc 2 --job.dump_folder="$folder/run" --model.args.n_layers=1
  --training.local_batch_size=1 --training.seq_len=64 --metrics.log_freq=1)

# A virtual GPU is none of the known devices.
"${train[@]}" --training.steps=2 >"$folder/log" 2>&1 || failed "the run fails:" "$folder/log"
grep -q "this run has no plan: no file of configs/devices has the device Virtual H100 80GB; metrics.plan_device names one" "$folder/log" ||
  failed "the log doesn't say why there is no plan:" "$folder/log"
test ! -e "$folder/run/plan.json" || failed "there is a plan:" "$folder/log"

# A run doesn't wait for its plan, so this holds it until the plan is there, and then waits until after the third step, when memory is compared, and the
# roofline report of the fourth.
run_beyond_the_plan() {
  rm -rf "$folder/run"
  touch "$folder/hold.3"
  TITAN_TEST_STEPS=$folder "${train[@]}" --training.steps=100000 --metrics.plan_device=h100 --experimental.custom_import="$held_step" "$@" >"$folder/log" 2>&1 &
  run=$!
  until [ -e "$folder/run/plan.json" ]; do
    kill -0 $run 2>"$folder/missing" || failed "the run ends before its plan:" "$folder/log"
    sleep 0.2
  done
  rm "$folder/hold.3"
  until grep -q '"step": [5-9].*"percent_of_plan": \|"step": [0-9]\{2,\}.*"percent_of_plan": ' "$folder/run/metrics.jsonl" 2>"$folder/missing"; do
    kill -0 $run 2>"$folder/missing" || failed "the run ends:" "$folder/log"
    sleep 0.2
  done
  kill -TERM $run
  wait $run || failed "the run fails:" "$folder/log"
}

# The ranks of a pipeline have different peaks, each as planned.
run_beyond_the_plan --validation.enable=false --parallelism.pipeline_parallel_degree=2 --model.args.n_layers=3 --training.local_batch_size=2 \
  --parallelism.pipeline_parallel_schedule=1F1B --parallelism.pipeline_parallel_microbatch_size=1
! grep -q "GiB of the plan" "$folder/log" || failed "memory that is as planned is called something else:" "$folder/log"
python3 - "$folder/run/plan.json" <<'PY' || failed "the ranks of the pipeline have equal peaks" "$folder/log"
import json, sys
first, second = [role["peak_gib"] for role in json.load(open(sys.argv[1]))["memory"]["by_role"]]
sys.exit(not 0.05 < abs(second / first - 1))
PY

# Validation, which a plan leaves out, has large batches here, so the run takes more than was planned.
run_beyond_the_plan --report-roofline --validation.enable --validation.freq=2 --validation.steps=1 --validation.local_batch_size=32 --validation.seq_len=64
for text in "the plan for NVIDIA H100 80GB HBM3: a step in .* GiB from the device; written to " "mfu: .*  of plan: [0-9.]*%" \
  "of rank [01] has taken up to [0-9.]* GiB from the device, [0-9.]* % more than the [0-9.]* GiB of the plan (every rank); 1 other rank is"; do
  grep -q -- "$text" "$folder/log" || failed "the log has no '$text':" "$folder/log"
done
[ "$(grep -c "GiB of the plan" "$folder/log")" = 1 ] || failed "memory is compared more than once:" "$folder/log"
"$titan" report "$folder/run" >"$folder/report" || failed "the report fails:" "$folder/report"
# The allocator can't tell for what it has given out memory, so parts of the rest are only planned.
if ! grep -q "Planned for 2 x NVIDIA H100 80GB HBM3" "$folder/run/report.html" || grep -v "of that, " "$folder/run/report.html" | grep -q "not measured"; then
  failed "the report doesn't compare the run with its plan:" "$folder/run/report.html"
fi

"${train[@]}" --training.steps=2 --metrics.plan_device=none >"$folder/log" 2>&1 || failed "the run fails:" "$folder/log"
! grep -q "no plan\|the plan for\|of plan" "$folder/log" || failed "a run without a plan speaks of one:" "$folder/log"
test ! -e "$folder/run/plan.json" || failed "the plan of an earlier start is still there:" "$folder/log"
