#!/usr/bin/env bash
# training_test.sh TITAN FOLDER [LAYOUT...]: three steps in float32 have the same losses and gradient norms on two virtual GPUs over NCCL as
# on two CPU ranks over gloo, digit for digit, with FSDP and with each LAYOUT, which is an argument of the program. A race ends the program.
set -euo pipefail
titan=$1 folder=$2
shift 2
source_folder=$(cd "$(dirname "$0")/../.." && pwd)
export VIRTUAL_GPU_RACES=fatal OMP_NUM_THREADS=1
numbers() { sed -n 's/.*\(step: .*grad_norm: *[0-9.]*\).*/\1/p' "$1"; }
failed=0
cd "$source_folder"  # paths in the config are relative to the working directory
for layout in "" "$@"; do
  train=("$titan" train "$source_folder/configs/llama3_debug.toml" --nproc 2 --job.dump_folder="$folder/run" --training.steps=3 --training.seq_len=64
    --training.mixed_precision_param=float32 $layout)
  for device in cpu gpu; do
    rm -rf "$folder"
    mkdir -p "$folder"
    run=("${train[@]}")
    [ $device = cpu ] || run=("$source_folder/scripts/virtual_gpus.sh" 2 -- "${train[@]}")
    "${run[@]}" >"$folder.$device" 2>&1 || { echo "on $device, with '$layout':"; tail -30 "$folder.$device"; exit 1; }
  done
  if [ -z "$(numbers "$folder.cpu")" ] || ! diff <(numbers "$folder.cpu") <(numbers "$folder.gpu"); then
    echo "layout '$layout': the CPU's numbers (<) and the virtual GPUs' (>) differ"
    failed=1
  fi
done
grep -q "GPU settings: CUDA [0-9.]*, .*, NCCL 2.*, allocator expandable_segments:True, .*on at most 4 multiprocessors unless .*; environment: " "$folder.gpu" ||
  { echo "the log doesn't show the GPUs' settings"; failed=1; }
# Counts are written although the program ends without destructors.
rm -f "$folder.counts"
VIRTUAL_GPU_COUNTERS="$folder.counts" "$source_folder/scripts/virtual_gpus.sh" 1 -- "$titan" train "$source_folder/configs/llama3_debug.toml" \
  --nproc 1 --job.dump_folder="$folder/run" --training.steps=1 --training.seq_len=64 >"$folder.counted" 2>&1 || { tail -30 "$folder.counted"; exit 1; }
grep -q '"aten::mm": {"launches": [1-9]' "$folder.counts" || { echo "no counts in $folder.counts"; failed=1; }
grep -q "attention of BFloat16 heads of 16 features uses cuDNN's kernel" "$folder.counted" || { echo "the log doesn't say which kernel attention uses"; failed=1; }
# Three ranks on two GPUs are refused before they start.
check=("$source_folder/scripts/virtual_gpus.sh" 2 -- "$titan" train "$source_folder/configs/llama3_debug.toml" --nproc 3 --check)
status=0
"${check[@]}" >"$folder.check" 2>&1 || status=$?
if [ $status != 2 ] || ! grep -q "NCCL needs one GPU per rank" "$folder.check"; then
  echo "three ranks on two GPUs pass the check before the start:"
  cat "$folder.check"
  failed=1
fi
# A job may show each rank its own GPU only, as SLURM's --gpus-per-task does.
for devices in '$LOCAL_RANK' 1; do
  status=0
  "$source_folder/scripts/virtual_gpus.sh" 2 -- "$titan" launch -n 2 -- sh -c "CUDA_VISIBLE_DEVICES=$devices exec '$titan' train '$source_folder/configs/llama3_debug.toml' \
    --job.dump_folder='$folder/run' --training.steps=1 --training.seq_len=64" >"$folder.own" 2>&1 || status=$?
  if [ $devices = 1 ]; then
    [ $status != 0 ] && grep -q "2 ranks on a host with 1 visible GPUs: NCCL needs one GPU per rank" "$folder.own"
  else
    [ $status = 0 ] && grep -q "step: *1 " "$folder.own"
  fi || { echo "two ranks with CUDA_VISIBLE_DEVICES=$devices:"; tail -30 "$folder.own"; failed=1; }
done
# Streams of a pipeline that share a queue of the device, by a setting or for another reason, could wait for each other forever.
while read -r setting text; do
  status=0
  env "$setting" "$source_folder/scripts/virtual_gpus.sh" 2 -- "$titan" train "$source_folder/configs/llama3_debug.toml" --nproc 2 \
    --job.dump_folder="$folder/run" --training.steps=1 --parallelism.pipeline_parallel_degree=2 >"$folder.queues" 2>&1 </dev/null || status=$?
  if [ $status = 0 ] || ! grep -q "$text" "$folder.queues"; then
    echo "a pipeline runs with $setting:"
    tail -30 "$folder.queues"
    failed=1
  fi
done <<'END'
CUDA_DEVICE_MAX_CONNECTIONS=1 CUDA_DEVICE_MAX_CONNECTIONS is 1: a pipeline over NCCL could hang
VIRTUAL_GPU_QUEUES=1 the device doesn't compute while it waits for a message
END
# If CUDA can't use the GPU, the log says why.
check=(env VIRTUAL_GPU_ERROR=802 "$source_folder/scripts/virtual_gpus.sh" 1 -- "$titan" train "$source_folder/configs/llama3_debug.toml" --check)
"${check[@]}" >"$folder.check" 2>&1
grep -q "this job runs on the CPU, because CUDA can't use it: system not yet initialized" "$folder.check" || { echo "a CPU in place of a GPU, without a warning:"; cat "$folder.check"; failed=1; }
status=0
"${check[@]}" --training.device=cuda >"$folder.check" 2>&1 || status=$?
if [ $status != 2 ] || ! grep -q "device 'cuda': CUDA can't use the GPU that is visible: system not yet initialized" "$folder.check"; then
  echo "a GPU that CUDA can't use passes the check before the start:"
  cat "$folder.check"
  failed=1
fi
# Deterministic runs are refused with a setting of cuBLAS that LibTorch would refuse at the first product.
check=(env CUBLAS_WORKSPACE_CONFIG=:0:0 "$source_folder/scripts/virtual_gpus.sh" 1 -- "$titan" train "$source_folder/configs/llama3_debug.toml" --debug.deterministic)
for how in --check --training.steps=1; do
  status=0
  "${check[@]}" --job.dump_folder="$folder/run" $how >"$folder.check" 2>&1 || status=$?
  if [ $status != 2 ] || ! grep -q "cuBLAS repeats its results only with CUBLAS_WORKSPACE_CONFIG = :4096:8 or :16:8, and it is :0:0" "$folder.check"; then
    echo "a deterministic run starts with $how and another workspace of cuBLAS:"
    cat "$folder.check"
    failed=1
  fi
done
exit $failed
