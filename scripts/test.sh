#!/usr/bin/env bash
# test.sh [ctest arguments]: sets up, builds what is stale, and runs the tests. Without arguments: all but those labelled nightly.
#   scripts/test.sh -L fast        the inner loop, under 3 minutes
#   scripts/test.sh -L nightly     the long ones
# In the end it says what was skipped for what this machine lacks; with TITAN_NO_SKIPS=1 that is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build.sh all
# Three groups of ranks at a time, on 2 cores: two kept 79 % of the processors at work.
test=(ctest --test-dir build --output-on-failure -j "$((3 * $(nproc)))")
if [ $# -gt 0 ]; then exec "${test[@]}" "$@"; fi
results=$PWD/build/test_results.xml
rm -f "$results"
status=0
"${test[@]}" -LE nightly --output-junit "$results" --test-output-size-passed 1000000 || status=$?
# Without results ctest has said what kept it from starting.
[ ! -e "$results" ] || scripts/skipped_tests.py "$results" || status=$((status ? status : 1))
exit "$status"
