#!/usr/bin/env bash
# sanitize.sh asan|tsan [TEST...]: builds tests with a sanitizer (in build-asan or build-tsan) and runs each program as a whole.
#   scripts/sanitize.sh asan                    unit tests, and distributed tests with 2 ranks
#   scripts/sanitize.sh tsan                    code that starts threads: log, data, checkpoints, observers, guards, collectives, offload,
#                                               pipelines
#   scripts/sanitize.sh asan titan_data_test    only this test
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-}
case $preset in
  asan)
    tests=(titan_{core,config,dist,tensor,ops,nn,float8,parallel,optim,data,checkpoint,train,observe,guard,job,cli,models}_test
           collectives_test dtensor_test fsdp_engine_test fsdp_paths_test fsdp_offload_test sharded_parameters_test
           tensor_parallel_test activation_layout_test context_parallel_test activation_checkpoint_test activation_checkpoint_paths_test
           pipeline_test pipeline_runtime_test pipeline_stages_test trainer_test checkpointer_test checkpoint_load_test
           checkpoint_failure_test)
    export ASAN_OPTIONS="detect_odr_violation=0" UBSAN_OPTIONS="print_stacktrace=1" ;;
  tsan)
    tests=(titan_{core,dist,data,parallel,checkpoint,observe,guard}_test collectives_test fsdp_offload_test pipeline_runtime_test checkpointer_test
           checkpoint_failure_test)
    export TSAN_OPTIONS="suppressions=$PWD/tests/tsan.supp:ignore_noninstrumented_modules=1" OMP_NUM_THREADS=1 ;;
  *)
    sed -n '2,6s/^# //p' "$0" >&2
    exit 2 ;;
esac
shift
if [ $# -gt 0 ]; then tests=("$@"); fi

scripts/bootstrap.sh
cmake --preset "$preset" >/dev/null
programs=(titan)
for test in "${tests[@]}"; do
  if [[ $test == titan_*_test ]]; then programs+=("$test"); else programs+=(distributed_tests); fi
done
cmake --build --preset "$preset" --parallel "${TITAN_BUILD_JOBS:-$(nproc)}" --target "${programs[@]}"

bin=build-$preset/bin
# The crash handler's tests need a process that a signal can kill; a sanitizer handles signals itself.
filter=--gtest_filter=-*CrashDeathTest*
failed=()
for test in "${tests[@]}"; do
  echo "== $preset $test"
  if [[ $test == titan_*_test ]]; then
    command=("$bin/$test" "$filter")
  else
    command=("$bin/titan" launch -n 2 -- "$bin/distributed_tests" "--file=$test")
  fi
  "${command[@]}" || failed+=("$test")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "$preset: failed: ${failed[*]}" >&2
  exit 1
fi
