#!/usr/bin/env bash
# test.sh [ctest arguments]: sets up, builds what is stale, and runs the tests. Without arguments: all but those labelled nightly.
#   scripts/test.sh -L fast        the inner loop, under 3 minutes
#   scripts/test.sh -L nightly     the long ones
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build.sh all
if [ $# -eq 0 ]; then set -- -LE nightly; fi
# Two groups of ranks at a time: on 2 cores that kept 79 % of the processors at work. One at a time wasn't measured.
exec ctest --test-dir build --output-on-failure -j "$((2 * $(nproc)))" "$@"
