#!/usr/bin/env bash
# update_docs.sh [FOLDER]: writes the generated pages (docs/config.md, docs/torchtitan_keys.md) and the generated parts of
# docs/pipeline_schedules.md (its table, and images/pipeline) into FOLDER (default: docs).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/docs}
cd "$root"
"$root/build/bin/titan" docs config > "$folder/config.md.new"
"$root/build/bin/titan" docs torchtitan-keys > "$folder/torchtitan_keys.md.new"
mv "$folder/config.md.new" "$folder/config.md"
mv "$folder/torchtitan_keys.md.new" "$folder/torchtitan_keys.md"
mkdir -p "$folder/images/pipeline"
for schedule in GPipe 1F1B Interleaved1F1B LoopedBFS InterleavedZeroBubble ZBVZeroBubble DualPipeV; do
  "$root/build/bin/titan" schedule --schedule "$schedule" --pp 4 --microbatches 8 --svg "$folder/images/pipeline/$schedule.svg" > /dev/null
done
LIST=$("$root/build/bin/titan" schedule --list) awk '
  /^<!-- end -->/ { inside = 0 }
  !inside { print }
  /^<!-- titan schedule --list -->/ { inside = 1; print ENVIRON["LIST"] }
' docs/pipeline_schedules.md > "$folder/pipeline_schedules.md.new"
mv "$folder/pipeline_schedules.md.new" "$folder/pipeline_schedules.md"
