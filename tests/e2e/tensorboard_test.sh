#!/usr/bin/env bash
# tensorboard_test.sh PYTHON TITAN CONFIG IMPORT: the tensorboard package reads our event files, value by value.
# The package is installed beside TITAN's build the first time; without network the test is skipped (exit 77).
set -euo pipefail
python=$1 titan=$2 config=$3 import=$4
packages="$(dirname "$titan")/../tensorboard"
if ! PYTHONPATH="$packages" "$python" -c 'import tensorboard' 2>/dev/null; then
  "$python" -m pip install -q --target "$packages" tensorboard || { echo "the tensorboard package can't be installed: skipped"; exit 77; }
fi
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
"$titan" train "$config" --experimental.custom_import "$import" --job.dump_folder "$run" --training.steps 4 --training.device cpu \
  --metrics.log_freq 1 --metrics.enable_tensorboard --validation.enable --validation.steps 1 --validation.seq_len 64
PYTHONPATH="$packages" "$python" - "$run" <<'PY'
import glob, json, struct, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

run = sys.argv[1]
(folder,) = glob.glob(run + "/tb/*")
events = EventAccumulator(folder)
events.Reload()
steps = [json.loads(line) for line in open(run + "/metrics.jsonl")]
as_float32 = lambda value: struct.unpack("f", struct.pack("f", value))[0]
for tag, key in (("loss_metrics/global_avg_loss", "loss"), ("loss_metrics/global_max_loss", "max_loss"), ("grad_norm", "grad_norm"),
                 ("lr", "lr"), ("throughput(tps)", "tps"), ("n_tokens_seen", "n_tokens_seen")):
    read = [(event.step, event.value) for event in events.Scalars(tag)]
    written = [(step["step"], as_float32(step[key])) for step in steps]
    assert read == written, (tag, read, written)
assert len(steps) == 4
assert "mfu(%)" not in events.Tags()["scalars"], "the peak of a CPU is unknown"
assert [event.step for event in events.Scalars("validation_metrics/loss")] == [1]
print("the tensorboard package reads", len(steps), "steps of", len(events.Tags()["scalars"]), "tags")
PY
