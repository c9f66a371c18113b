#!/usr/bin/env bash
# update_docs.sh [FOLDER]: writes the generated pages (docs/config.md, docs/torchtitan_keys.md) into FOLDER (default: docs).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/docs}
cd "$root"
"$root/build/bin/titan" docs config > "$folder/config.md.new"
"$root/build/bin/titan" docs torchtitan-keys > "$folder/torchtitan_keys.md.new"
mv "$folder/config.md.new" "$folder/config.md"
mv "$folder/torchtitan_keys.md.new" "$folder/torchtitan_keys.md"
