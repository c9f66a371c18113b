#!/usr/bin/env bash
# memory_snapshot_test.sh PYTHON TITAN TEXT...: PyTorch's memory viewer can read the memory snapshots of a run on the CPU: its keys, through
# Python's pickle; events that lead to the segments and blocks at the end; and, where PYTHON has torch, torch.cuda._memory_viz.
set -euo pipefail
python=$1 titan=$2 text=$3
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
"$titan" train --model.name llama3 --model.flavor debugmodel --model.hf_assets_path bytes --model.args.vocab_size 258 --model.args.n_layers 2 \
  --training.dataset text --training.dataset_path "$text" --training.local_batch_size 2 --training.seq_len 512 --training.steps 5 \
  --training.mixed_precision_param float32 --training.device cpu --job.dump_folder "$run" \
  --profiling.enable_memory_snapshot --profiling.profile_freq 2
"$python" - "$run" <<'PY'
import glob, os, pickle, sys

run = sys.argv[1]
files = sorted(glob.glob(run + "/memory_snapshot/*/*"))
assert [os.path.relpath(file, run) for file in files] == [
    f"memory_snapshot/iteration_{step}/rank0_memory_snapshot.pickle" for step in (2, 4)], files
with open(files[-1], "rb") as file:
    snapshot = pickle.load(file)

(trace,) = snapshot["device_traces"]
assert len(trace) > 50, len(trace)
segments, blocks = {}, {}
for event in trace:
    assert event["stream"] == 0 and event["time_us"] > 1e15 and event["frames"], event
    action, place = event["action"], event["addr"]
    if action == "segment_alloc":
        assert place not in segments, event
        segments[place] = event["size"]
    elif action == "segment_free":
        assert place not in blocks and segments.pop(place) == event["size"], event
    elif action == "alloc":
        assert place not in blocks and 0 < event["size"] <= segments[place], event
        blocks[place] = event["size"]
    elif action == "free_requested":
        assert blocks[place] == event["size"], event
    else:
        assert action == "free_completed" and blocks.pop(place) == event["size"], event
assert segments == {segment["address"]: segment["total_size"] for segment in snapshot["segments"]}
in_use = {}
for segment in snapshot["segments"]:
    assert segment["device"] == 0 and segment["segment_type"] == "large"
    (block,) = segment["blocks"]
    assert block["size"] == segment["total_size"] and block["frames"]
    assert segment["allocated_size"] == segment["active_size"] == block["requested_size"]
    if block["state"] == "active_allocated":
        in_use[block["address"]] = block["requested_size"]
    else:
        assert block["state"] == "inactive" and block["requested_size"] == 0
assert in_use == blocks
names = {frame["name"] for event in trace for frame in event["frames"]}
assert any("titan::" in name for name in names), sorted(names)[:50]
assert sum(in_use.values()) > 3 * 4 * 250_000, "parameters and two moments"

try:
    from torch.cuda import _memory_viz
except ImportError:
    print("no torch in", sys.executable, "- its viewer is left out")
else:
    for read in (_memory_viz.segsum, _memory_viz.trace, _memory_viz.trace_plot, _memory_viz.segment_plot):
        assert len(read(snapshot)) > 100, read
print(len(trace), "events,", len(segments), "segments,", len(in_use), "blocks in use")
PY
