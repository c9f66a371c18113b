#!/usr/bin/env bash
# test.sh [ctest arguments]: sets up, builds, and runs the tests. Without arguments it runs all tests except those labeled nightly.
#   scripts/test.sh -L fast        the inner loop, under 3 minutes
#   scripts/test.sh -L nightly     the long tests
# At the end it lists the tests that were skipped because this machine lacks something; with TITAN_NO_SKIPS=1 they count as failures, with
# TITAN_NO_SKIPS=NAME the test of that name does.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build.sh all
# Threads that wait leave the processors to other tests. Without this, a test of two ranks with two threads each took 52 processor seconds in place of 9.
export OMP_WAIT_POLICY=passive
# Three groups of ranks at a time on 2 cores: two groups used only 79 % of the processors.
test=(ctest --test-dir build --output-on-failure -j "$((3 * $(nproc)))")
[ $# -gt 0 ] || set -- -LE nightly
results=$PWD/build/test_results.xml
rm -f "$results"
status=0
"${test[@]}" "$@" --output-junit "$results" --test-output-size-passed 1000000 || status=$?
# If there are no results, ctest has printed why it couldn't start.
[ ! -e "$results" ] || scripts/skipped_tests.py "$results" || status=$((status ? status : 1))
exit "$status"
