#!/usr/bin/env bash
# run_memory_test.sh TITAN FOLDER [settings]: a run of 8B at its real size, rank 0 of eight, takes what its own plan says from the device, within 1.5 %.
set -euo pipefail
titan=$1 folder=$2
shift 2
cd "$(dirname "$0")/../.."  # paths in the config are relative to the working directory
rm -rf "$folder"
mkdir -p "$folder"
export VIRTUAL_GPU_LIBTORCH=1 VIRTUAL_GPU_PROMPT=1 VIRTUAL_GPU_RACES=fatal
scripts/virtual_gpus.sh 1 -- "$titan" train configs/llama3_8b.toml --nproc 8 --comm.mode=fake_backend --checkpoint.enable=false --training.steps=100000 \
  --metrics.log_freq=1 --metrics.plan_device=h100 --job.dump_folder="$folder/run" --model.hf_assets_path=bytes --training.dataset=cpp_headers \
  --training.dataset_path=none "$@" >"$folder/log" 2>&1 &
run=$!
await() {
  until "$@" 2>"$folder/missing"; do
    kill -0 $run 2>"$folder/missing" || { tail -n 40 "$folder/log"; exit 1; }
    sleep 0.05
  done
}
await grep -q '"step": [5-9]\|"step": [0-9]\{2,\}' "$folder/run/metrics.jsonl"
# A run doesn't wait for its plan. After some steps its numbers, which nothing computes, may stop it, so it is paused until it has its plan.
trap 'kill -KILL $run 2>"$folder/missing"' EXIT
plans() { ! grep -q '^State:.[^Z]' /dev/null $(sed 's| *\([0-9]\+\) *|/proc/\1/status |g' /proc/$run/task/*/children); }
kill -STOP $run
await plans
kill -CONT $run
await test -e "$folder/run/plan.json"
kill -TERM $run
wait $run || { tail -n 40 "$folder/log"; exit 1; }
trap - EXIT
python3 - "$folder/run" <<'PY'
import json, pathlib, sys
run = pathlib.Path(sys.argv[1])
planned = json.loads((run / "plan.json").read_text())["memory"]["by_role"][0]["peak_gib"]
steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
taken = max(step["memory_gib"] for step in steps if "memory_gib" in step)
print(f"{taken:.2f} GiB from the device, planned {planned:.2f} ({100 * (taken / planned - 1):+.2f} %)")
sys.exit(planned < 10 or abs(taken / planned - 1) > 0.015)
PY
