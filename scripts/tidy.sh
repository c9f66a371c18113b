#!/usr/bin/env bash
# tidy.sh [FILE...]: runs clang-tidy 14 (.clang-tidy) on the given sources, or on the whole library, which takes an hour on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v clang-tidy >/dev/null || { echo "tidy.sh needs clang-tidy (Debian: apt-get install clang-tidy)" >&2; exit 1; }
# This build folder is only configured, never built: clang can't read GCC's precompiled headers.
[ -e build-tidy/compile_commands.json ] || cmake --preset tidy >/dev/null
[ $# -gt 0 ] || mapfile -t files < <(git ls-files 'src/*.cpp' 'models/*.cpp' | grep -v '^src/cuda_plugin/')
[ $# -eq 0 ] || files=("$@")
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P 2 clang-tidy -p build-tidy --quiet
