#!/usr/bin/env bash
# tidy.sh [FILE...]: clang-tidy 14 (.clang-tidy) over the given sources, or over all of the library's: that takes an hour on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v clang-tidy >/dev/null || { echo "tidy.sh needs clang-tidy (Debian: apt-get install clang-tidy)" >&2; exit 1; }
# A build folder that is only configured: clang can't read GCC's precompiled headers.
[ -e build-tidy/compile_commands.json ] || cmake --preset tidy >/dev/null
[ $# -gt 0 ] || mapfile -t files < <(git ls-files 'src/*.cpp' 'models/*.cpp' | grep -v '^src/cuda_plugin/')
[ $# -eq 0 ] || files=("$@")
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P 2 clang-tidy -p build-tidy --quiet
