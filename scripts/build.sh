#!/usr/bin/env bash
# build.sh TARGET...: sets up, configures the release preset when needed, and builds what is stale. Quiet when nothing is.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh
if [ ! -e build/build.ninja ] || [ CMakePresets.json -nt build/build.ninja ]; then
  cmake --preset release >build.log.tmp 2>&1 || { cat build.log.tmp >&2; rm -f build.log.tmp; exit 1; }
  rm -f build.log.tmp
fi
# A dry run first, so that an up-to-date tree says nothing.
if ninja -C build -n "$@" | grep -q 'no work to do'; then exit 0; fi
cmake --build build --parallel "${TITAN_BUILD_JOBS:-$(nproc)}" --target "$@" >&2
