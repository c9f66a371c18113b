#!/usr/bin/env bash
# graphs_test.sh TITAN FOLDER NAME [ARGUMENT...]: eight steps that launch a recorded graph (compile.enable) have the losses, gradient norms and
# final weights of eight that don't, to the bit, on two virtual GPUs or as many as --nproc says. A test whose name ends in resumed stops after four steps and
# resumes. All of a step is recorded, except in the test named host_lr: the optimizer's part, whose learning rate comes from the host. A race ends the
# program, and so does a recorded copy that reads the host's memory.
set -euo pipefail
titan=$1 folder=$2/$3
shift 3
source_folder=$(cd "$(dirname "$0")/../.." && pwd)
export VIRTUAL_GPU_RACES=fatal VIRTUAL_GPU_GRAPHS_READ_HOST=0 OMP_NUM_THREADS=1
rm -rf "$folder"
mkdir -p "$folder"
cd "$source_folder"  # paths in the config are relative to the working directory
steps=8
[[ $folder != *resumed ]] || steps="4 8"
for compile in false true; do
  for until in $steps; do
    scripts/virtual_gpus.sh 4 -- "$titan" train configs/llama3_debug.toml --nproc=2 --training.steps=$until --lr_scheduler.total_steps=8 --training.seq_len=64 \
      --training.local_batch_size=2 --model.args.n_layers=2 --metrics.log_freq=1 --checkpoint.enable --checkpoint.interval=100 --checkpoint.async_mode=disabled \
      --job.dump_folder="$folder/$compile" "$@" --compile.enable=$compile >>"$folder/$compile.log" 2>&1 ||
      { echo "the run with compile.enable = $compile fails:"; tail -n 40 "$folder/$compile.log"; exit 1; }
  done
done
grep -q "is recorded as a CUDA graph" "$folder/true.log" || { echo "nothing was recorded:"; tail -n 20 "$folder/true.log"; exit 1; }
parts=0
[ "$(basename "$folder")" != host_lr ] || parts=1
[ "$(grep -c "The optimizer's part runs as usual" "$folder/true.log")" = $parts ] || { echo "the wrong parts are recorded:"; tail -n 20 "$folder/true.log"; exit 1; }
warnings=0
[[ $(basename "$folder") != pipeline* ]] || warnings=1
[ "$(grep -c "graphs of a pipeline's schedule have run on virtual GPUs only" "$folder/true.log")" = $warnings ] || { echo "there should be $warnings warnings of a pipeline's graphs"; exit 1; }
numbers() { sed -n 's/.*\(step: .*grad_norm: *[0-9.]*\).*/\1/p' "$folder/$1.log"; }
[ "$(numbers true | wc -l)" = 8 ] || { echo "no numbers of eight steps:"; tail -n 20 "$folder/true.log"; exit 1; }
diff <(numbers false) <(numbers true)
"$titan" checkpoint diff "$folder"/{false,true}/checkpoint/step-8 >"$folder/diff" 2>&1 || true  # compile.enable differs
grep -q "^0 of [1-9][0-9]* tensors differ" "$folder/diff" || { cat "$folder/diff"; exit 1; }
