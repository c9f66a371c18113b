#!/usr/bin/env bash
# gpu_day.sh [FILE]: what one GPU can tell about this build, in one command and within 9 minutes, in one file (gpu_day.txt): tests, launches and
# memory beside those of a virtual GPU, compute-sanitizer, benchmarks. First: scripts/build.sh all benchmarks virtual_gpu. A machine without a network
# takes a copy of the whole folder, with build and .venv, at the same path (docs/gpu_performance.md says more). TITAN_PYTHON: another Python with PyTorch.
# gpu_day.sh --speed [FILE]: only a training step's speed (gpu_speed.txt), in 9 more minutes: with LibTitan's kernels and without, as a CUDA graph,
# and in Float8 (also with delayed scales, and MXFP8 where the GPU has it), beside PyTorch, eager and compiled, and torchao; and what the time of a
# step goes into, in bf16 and in Float8.
# GPU_DAY_UNLIMITED=1 gpu_day.sh [--speed] [FILE]: the same without limits of time, for whoever has an hour.
set -uo pipefail
cd "$(dirname "$0")/.."
only_speed=false
if [ "${1:-}" = --speed ]; then
  only_speed=true
  shift
fi
file=$(realpath -m "${1:-$($only_speed && echo gpu_speed.txt || echo gpu_day.txt)}")
programs=build/bin
export python=${TITAN_PYTHON:-.venv/bin/python}
folder=build/test_tmp/gpu_day
export on_gpu='*OnGpu*'  # tests
for needed in titan distributed_tests e2e_tests attention_bench overlap_bench ../lib/libtitan_cuda.so ../virtual_gpu/libcudart.so.13; do
  [ -e $programs/$needed ] || { echo "gpu_day.sh: $programs/$needed is missing: scripts/build.sh all benchmarks virtual_gpu" >&2; exit 2; }
done
# With a virtual GPU (scripts/virtual_gpus.sh 1 -- scripts/gpu_day.sh) it tries its own commands without limits of time. Times mean nothing there,
# compute-sanitizer needs a driver, and of the tests that take hours there (nightly.*.cuda.virtual) it runs a few.
export on_virtual=false
if [ ! -e /dev/nvidia0 ]; then
  [ -n "${VIRTUAL_GPU_DEVICES:-}" ] || { echo "gpu_day.sh: no GPU is visible" >&2; exit 2; }
  on_virtual=true
fi
command -v ctest >/dev/null || { echo "gpu_day.sh: ctest is missing (Debian: apt-get install cmake)" >&2; exit 2; }
"$python" -c "import torch" || { echo "gpu_day.sh: $python has no PyTorch" >&2; exit 2; }
if $only_speed && ! "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; then
  echo "gpu_day.sh: torch.compile needs Python.h and a C compiler (Debian: apt-get install python3-dev gcc)" >&2
  exit 2
fi
# Otherwise everything would run on the CPU: a driver may be too old for this LibTorch.
$programs/titan train configs/llama3_debug.toml --nproc 1 --training.device=cuda --check >/dev/null || { echo "gpu_day.sh: the GPU can't be used" >&2; exit 2; }
export is_limited=true
if $on_virtual || [ -n "${GPU_DAY_UNLIMITED:-}" ]; then is_limited=false; fi
rm -rf $folder
mkdir -p $folder
failed=0

# Adds a part's output to the file. Progress of tests that passed, and lists of their names, say nothing.
keep_output() {
  grep -vE '^ *Start +[0-9]+:|Note: Google Test filter|^\[ +(RUN|OK) |^\[-{10}\]' $folder/output | tail -n 800 | cut -c 1-4000 >>"$file"
}
running=
trap '[ -z "$running" ] || { kill $running; wait $running; keep_output; }; echo "ended from outside" >>"$file"; exit 1' INT TERM

# part SECONDS TITLE COMMAND...: runs the command under a time limit, with its output in the file.
part() {
  local limit=$1 title=$2 begin=$SECONDS status=0
  shift 2
  $is_limited || limit=0
  printf '\n## %s\n\n    %s\n\n' "$title" "$*" >>"$file"
  echo "gpu_day: $title$(! $is_limited || echo " (at most $limit s)")" >&2
  timeout -k 5 "$limit" "$@" >$folder/output 2>&1 &
  running=$!
  wait $running || status=$?
  running=
  keep_output
  # It is 137 also if memory ran out.
  [ $status != 124 ] && ! { [ $status = 137 ] && $is_limited && ((SECONDS - begin >= limit)); } || echo "ended by its limit of $limit s" >>"$file"
  [ $status = 0 ] || failed=1
  printf '\nexit code %s after %s s\n' $status $((SECONDS - begin)) >>"$file"
}

# One training step at real width: the first layers of Llama 3.1 8B, FSDP on one rank; of --speed the model of `speed 8b_8`.
layers=2 tokens=4096 recompute=selective
! $only_speed || layers=8 tokens=8192 recompute=none
train=($programs/titan train configs/llama3_8b.toml --nproc 1 --model.args.n_layers=$layers --training.dataset=synthetic --model.hf_assets_path=bytes
  --training.seq_len=$tokens --training.local_batch_size=1 --activation_checkpoint.mode=$recompute --checkpoint.enable=false
  --training.device=cuda --metrics.log_freq=1 --fault_tolerance.on_nonfinite=skip)

# steps_of NAME COMMAND...: the last step's numbers, and what differs between runs of 4 and 8 steps.
measure() {
  local name=$1 steps
  shift
  for steps in 4 8; do
    VIRTUAL_GPU_COUNTERS=$folder/$name.$steps.json "$@" "${train[@]}" --training.steps=$steps --job.dump_folder=$folder/$name.$steps \
      --profiling.enable_profiling=true --profiling.profile_freq=8 --profiling.profiler_warmup=1 >$folder/$name.log 2>&1 || { tail -n 30 $folder/$name.log; return 1; }
  done
}

# The virtual GPU that is like this one.
profile() {
  case "$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null)" in
    *A100*) echo a100 ;;
    *H200*) echo h200 ;;
    *B200*) echo b200 ;;
    *) echo "${VIRTUAL_GPU_PROFILE:-h100}" ;;
  esac
}

compare_with_virtual() {
  measure device env && measure virtual env VIRTUAL_GPU_MEMORY_ONLY=1 VIRTUAL_GPU_POISON=0 scripts/virtual_gpus.sh 1 --profile "$(profile)" -- || return 1
  "$python" - $folder <<'PYTHON'
import collections, gzip, json, pathlib, statistics, sys
folder = pathlib.Path(sys.argv[1])
def last(name):
    """The last step's numbers; times of steps that aren't profiled."""
    steps = [json.loads(line) for line in (folder / f"{name}.8/metrics.jsonl").read_text().splitlines()]
    usual = {key: statistics.median(step[key] for step in steps[2:6]) for key in ("step_s", "tps", "mfu") if steps[2].get(key) is not None}
    return steps[-1] | usual
def traced(name):
    """Launches of the eighth step, and calls of the host that wait or take memory (with the profiler's own)."""
    trace = next((folder / f"{name}.8").rglob("iteration_8/rank0_trace.json.gz"))
    kernels, calls = collections.Counter(), collections.Counter()
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        kind = event.get("cat")
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels[event.get("name") if kind == "kernel" else kind] += 1
        elif kind == "cuda_runtime" and ("Synchronize" in event["name"] or "Malloc" in event["name"]):
            calls[event["name"]] += 1
    return kernels, calls
def counted(name, field):
    few, many = collections.Counter(), collections.Counter()
    for steps, counts in ((4, few), (8, many)):
        for operations in json.loads((folder / f"{name}.{steps}.json").read_text()).values():
            counts.update({op: count.get(field, 0) for op, count in operations.items()})
    return {op: (number - few[op]) / 4 for op, number in many.items() if number > few[op]}
device, virtual = last("device"), last("virtual")
print(f"{'':26}{'device':>12}{'virtual':>12}")
def grown(name):
    """What a GPU's calls don't show if its allocator has expandable segments."""
    steps = [json.loads(line) for line in (folder / f"{name}.8/metrics.jsonl").read_text().splitlines()]
    peaks = [step["memory_gib"] for step in steps if "memory_gib" in step]
    return peaks[-1] - peaks[2]
print(f"{'memory_gib after step 3':26}{grown('device'):>+12.3f}{grown('virtual'):>+12.3f}")
for key in ("memory_gib", "active_gib", "alloc_retries", "step_s", "tps", "mfu"):
    print(f"{key:26}{device.get(key, '-'):>12.5}{virtual.get(key, '-'):>12.5}" if isinstance(device.get(key), float) else
          f"{key:26}{device.get(key, '-')!s:>12}{virtual.get(key, '-')!s:>12}")
(kernels, calls), operations = traced("device"), counted("virtual", "launches")
print(f"{'launches in a step':26}{sum(kernels.values()):>12}{sum(n for op, n in operations.items() if op not in ('allocation', 'free')):>12.0f}")
print("\nthe device's calls that wait or take memory, in step 8:", dict(calls) or "none")
print("those of the virtual GPU, in a step:", dict(collections.Counter(counted("virtual", "host_waits")) + collections.Counter(counted("virtual", "calls"))) or "none")
print("\nkernels of the device in step 8:")
for name, number in kernels.most_common(60):
    print(f"{number:6}  {name[:150]}")
print("\noperations of the virtual GPU in a step:")
for name, number in sorted(operations.items(), key=lambda item: -item[1]):
    if number:
        print(f"{number:8.1f}  {name}")
PYTHON
}

# The worst status, and the tools that it belongs to; 124 would be read as the part's own limit. Few runs, because each loads LibTorch under the tool first.
# Virtual GPUs find the faults of initcheck and synccheck.
sanitize() {
  local sanitizer tool layer status worst=0
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -n 1)
  [ -n "$sanitizer" ] || { echo "compute-sanitizer isn't installed"; return 1; }
  for tool in memcheck racecheck; do
    for layer in ops float8; do
      status=0
      timeout -k 2 $($is_limited && echo 25 || echo 0) "$sanitizer" --tool $tool --error-exitcode 9 --kernel-regex kns=titan $programs/titan_${layer}_test --gtest_filter="$on_gpu" || status=$?
      [ $status = 0 ] || echo "$tool of titan_${layer}_test: $([ $status = 124 ] || [ $status = 137 ] && echo "ended by its limit of 25 s" || echo "exit code $status")"
      [ $status != 124 ] && [ $status != 137 ] || status=8  # less than what was found
      [ $status -le $worst ] || worst=$status
    done
  done
  return $worst
}

unit_tests() {
  local layer status=0
  for layer in dist ops optim float8; do
    $programs/titan_${layer}_test --gtest_filter="$on_gpu" || status=1
  done
  return $status
}

# Through NCCL, as one rank, and recorded steps.
nccl_tests() {
  local status=0
  $programs/titan launch -n 1 -- $programs/distributed_tests --nccl --file=collectives_test || status=1
  TITAN_TEST_DEVICE=cuda TITAN_TEST_BACKEND=nccl $programs/e2e_tests --gtest_filter='*StepGraphs*/OneGpu' || status=1
  return $status
}

benchmarks() {
  local model status=0
  $programs/attention_bench --device cuda --dtype bf16 --length 16384 --ranks 4 --heads 32 --kv-heads 8 --size 128 || status=1
  for model in 8B 70B; do $programs/overlap_bench --device cuda --dtype bf16 --model $model --tp 8 --tokens 8192 || status=1; done
  return $status
}

# The most important rows come first. `exec` lets `timeout` signal the program itself, which then prints the table of the rows that are done.
speed() {
  ! $on_virtual || exec "$python" scripts/float8_table.py --quick
  exec "$python" scripts/float8_table.py --steps 5 --warmup 4 --models "$1" --recipes \
    bf16,bf16:graphs,tensorwise,tensorwise:graphs,bf16:reference,tensorwise:delayed"$(mxfp8)",rowwise,rowwise:graphs,rowwise_with_gw_hp
}

# Where the GPU has units for it.
mxfp8() {
  [ "$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)" -ge 100 ] && echo ,mxfp8_cublas,mxfp8_cublas_rceil
}

{
  echo "# GPU day, $(date -u +%F), commit $(git describe --always --dirty 2>/dev/null || echo unknown)"
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit,ecc.mode.current --format=csv 2>&1
  grep -m 1 'model name' /proc/cpuinfo
} >"$file"
export -f speed mxfp8 measure profile compare_with_virtual sanitize unit_tests nccl_tests benchmarks
# A virtual GPU takes minutes to compute what some of these do, and their numbers mean nothing there.
only_memory=()
! $on_virtual || only_memory=(env VIRTUAL_GPU_MEMORY_ONLY=1 VIRTUAL_GPU_POISON=0)
if $only_speed; then
  part 35 "Where a step's time goes" "${only_memory[@]}" "${train[@]}" --training.steps=6 --job.dump_folder=$folder/roofline --report-roofline
  part 35 "Where a step's time goes in Float8" "${only_memory[@]}" "${train[@]}" --training.steps=6 --job.dump_folder=$folder/float8_roofline \
    --report-roofline --model.converters=quantize.linear.float8 --quantize.linear.float8.recipe_name=tensorwise
  part 205 "A step of the 1.5B model" bash -c "speed 1b"
  $on_virtual || part 240 "A step of 8B's first eight layers" bash -c "speed 8b_8"
  echo "gpu_day: the results are in $file" >&2
  exit $failed
fi
part 50 "Unit tests" bash -c "programs=$programs; unit_tests"
part 35 "Tests over NCCL" bash -c "programs=$programs; nccl_tests"
# The largest files are for whoever has an hour. ctest ends by itself in time to list what failed.
tests=(-L cuda)
! $is_limited || tests+=(-E 'e2e.(parity|resume|float8_run|train_command|pipeline_run)_test' --stop-time "$(date -d '+110 seconds' +%H:%M:%S)")
! $on_virtual || tests=(-L cuda -R 'collectives_test.[12]_|fsdp_engine_test.2_')
part 125 "Distributed and end-to-end tests" ctest --test-dir build "${tests[@]}" -j "$(nproc)" --output-on-failure --no-tests=error
part 110 "Launches and memory, beside a virtual GPU's" "${only_memory[@]}" bash -c "$(declare -p folder programs train); compare_with_virtual"
$on_virtual || part 110 "compute-sanitizer" bash -c "programs=$programs; sanitize"
part 80 "Benchmarks" "${only_memory[@]}" bash -c "programs=$programs; benchmarks"
echo "gpu_day: the results are in $file" >&2
exit $failed
