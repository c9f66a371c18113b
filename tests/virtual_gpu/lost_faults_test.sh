#!/usr/bin/env bash
# lost_faults_test.sh VIRTUAL_GPU_TEST FOLDER: a fault in a process fails the program that scripts/virtual_gpus.sh has started, though its parent
# ignores its end. Reports of each kind are printed when the program ends.
set -euo pipefail
test=$1 folder=$2
source_folder=$(cd "$(dirname "$0")/../.." && pwd)
export VIRTUAL_GPU_RACES=fatal
rm -rf "$folder"
mkdir -p "$folder"
# run STATUS SCRIPT: the script runs cases of the test program, of which it prints nothing.
run() {
  status=0
  printf '%s\n' 'run() { "$test" --gtest_filter="$1" >"$folder/case" 2>&1; }' "$2" >"$folder/script"
  test=$test folder=$folder "$source_folder/scripts/virtual_gpus.sh" 1 -- bash "$folder/script" >"$folder/log" 2>&1 || status=$?
  [ $status = "$1" ] || { echo "the exit code is $status and not $1:"; tail -n 40 "$folder/log" "$folder/case"; exit 1; }
}
run 0 'run VirtualGpu.TwoReadsAreNoRace'
[ ! -s "$folder/log" ] || { echo "a program without faults prints:"; cat "$folder/log"; exit 1; }
run 1 'run VirtualGpu.FindsAMissingWait; run VirtualGpu.FindsRacesWithinAKernel; run VirtualGpu.FindsReadsOfBytesThatNothingHasWritten
  run FaultsDeathTest.OperationsBeyondAnAllocationsEnd*; run VirtualGpuDeathTest.FunctionsThatAreNotWritten*
  run VirtualGpuDeathTest.AccessesThatAKernelMustNotMake*; exit 0'
for report in "processes of this program had faults" "RACE: aten::mul " "RACE in .*no barrier is between" UNWRITTEN "outside the allocation of 256" \
  "outside the allocation of 40" "ncclCommWindowRegister is not written" "in shared memory, which nothing has written"; do
  grep -q "$report" "$folder/log" || { echo "there is no report with '$report':"; cat "$folder/log"; exit 1; }
done
run 7 'run VirtualGpu.FindsAMissingWait; exit 7'
grep -q "RACE: aten::mul " "$folder/log" || { echo "a program that fails doesn't report:"; cat "$folder/log"; exit 1; }
# As ranks end that were lost, and titan.
run 1 'run VirtualGpu.FindsAMissingWait; exec python3 -c "import os; os._exit(0)"'
