#!/usr/bin/env bash
# build.sh TARGET...: sets up, configures the release preset if necessary, and builds the targets. Prints nothing when all are up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/bootstrap.sh

# One build at a time: two ninjas in one folder would overwrite each other's files.
mkdir -p build
exec 9>build/.lock
flock 9

configured_torch() { sed -n 's/^TITAN_TORCH_DIR:PATH=//p' build/CMakeCache.txt 2>/dev/null; }

configure() {
  local log
  log=$(mktemp)
  # Another LibTorch invalidates everything in the cache.
  if ! cmake --preset release ${TITAN_TORCH_DIR:+--fresh "-DTITAN_TORCH_DIR=$TITAN_TORCH_DIR"} >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    exit 1
  fi
  rm -f "$log"
}

if [ ! -e build/build.ninja ] || [ CMakePresets.json -nt build/build.ninja ]; then
  configure
elif [ -n "${TITAN_TORCH_DIR:-}" ] && [ "$(realpath -s "$TITAN_TORCH_DIR")" != "$(configured_torch)" ]; then
  configure
fi
# Ninja prints this when there is nothing to do.
quiet='^ninja: no work to do|Re-checking globbed directories'
cmake --build build --parallel "${TITAN_BUILD_JOBS:-$(nproc)}" --target "$@" 2>&1 | { grep --line-buffered -vE "$quiet" || true; } >&2
