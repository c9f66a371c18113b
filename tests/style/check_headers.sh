#!/usr/bin/env bash
# Every public header compiles alone, and none includes a heavy or CUDA header. check_headers.sh SOURCE_DIR COMPILER FLAGS...
set -euo pipefail
source_dir=$1
shift
if grep -rnE '#include <(torch/torch\.h|torch/all\.h|nccl\.h|cuda[_a-z]*\.h)>' "$source_dir/include"; then
  echo "heavy headers in include/" >&2
  exit 1
fi
list=$(mktemp -d)
trap 'rm -rf "$list"' EXIT
cd "$source_dir/include"
# A precompiled header of what they share makes each one a fraction of a second.
cp "$source_dir/cmake/pch.h" "$list/pch.h"
"$@" -x c++-header "$list/pch.h" -o "$list/pch.h.gch"
find titan -name '*.h' ! -name '*_impl.h' | sort >"$list/headers"
xargs -P 2 -I{} sh -c 'header=$1; shift; printf "#include \"%s\"\n" "$header" | "$@" -include '"$list"'/pch.h -fsyntax-only -I. -x c++ - || { echo "$header does not compile alone" >&2; exit 255; }' _ {} "$@" <"$list/headers"
echo "$(wc -l <"$list/headers") headers compile alone"
