#!/usr/bin/env bash
# format.sh [--check]: formats the C++ files (clang-format 14, as in Debian 12). With --check it only lists the files that need formatting.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=(-i)
[ "${1:-}" != --check ] || mode=(--dry-run -Werror)
command -v clang-format >/dev/null || { echo "format.sh needs clang-format (Debian: apt-get install clang-format)" >&2; exit 1; }
git ls-files -z --cached --others --exclude-standard '*.h' '*.cpp' '*.cu' | xargs -0 clang-format --style=file "${mode[@]}"
