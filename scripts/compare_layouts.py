#!/usr/bin/env python3
"""Ranks of layouts on this machine's CPU: titan plan's order beside the measured one.

    scripts/compare_layouts.py [--steps N] [--runs N] [--device FILE]

Measures the machine (titan plan --calibrate), plans each layout of four ranks for two sizes of model, trains each for a few steps, and prints both
with Spearman's correlation of their orders, and of two measurements. A measurement is the fastest step of several runs. All layouts take turns, so
that a machine whose speed changes is as fast for each. Run it on a machine that does nothing else. A plan is good if its correlation with each
measurement is at least 0.9, or at least that of the two measurements if it is lower."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TITAN = str(ROOT / "build/bin/titan")
RANKS = 4
SIZES = {"debug model": [], "dim 512, 8 layers": ["--model.args.dim", "512", "--model.args.n_layers", "8", "--model.args.n_heads", "8"]}
PIPELINE = ["--parallelism.pipeline_parallel_schedule", "1F1B", "--parallelism.pipeline_parallel_microbatch_size", "1"]


def degrees(replicate=1, tensor=1, context=1, pipeline=1, more=()):
    words = ["--parallelism.data_parallel_replicate_degree", str(replicate), "--parallelism.tensor_parallel_degree", str(tensor),
             "--parallelism.context_parallel_degree", str(context), "--parallelism.pipeline_parallel_degree", str(pipeline)]
    # 16 sequences a step on each layout.
    replicas = RANKS // (tensor * context * pipeline)
    words += ["--training.local_batch_size", str(16 // replicas), "--training.global_batch_size", "16"]
    return words + (PIPELINE if pipeline > 1 else []) + list(more)


LAYOUTS = {
    "FSDP 4": degrees(),
    "FSDP 4, full recompute": degrees(more=["--activation_checkpoint.mode", "full"]),
    "HSDP 2 x 2": degrees(replicate=2),
    "DDP 4": degrees(replicate=4),
    "TP 4": degrees(tensor=4),
    "TP 2": degrees(tensor=2),
    "TP 2, full recompute": degrees(tensor=2, more=["--activation_checkpoint.mode", "full"]),
    "CP 2": degrees(context=2),
    "CP 4": degrees(context=4),
    "PP 2": degrees(pipeline=2),
    "PP 4": degrees(pipeline=4),
    "PP 2, TP 2": degrees(pipeline=2, tensor=2),
    "PP 2, CP 2": degrees(pipeline=2, context=2),
    "TP 2, CP 2": degrees(tensor=2, context=2),
}


def planned(settings, device):
    command = [TITAN, "plan", "configs/llama3_debug.toml", "--world", str(RANKS), "--device", device, "--json", *settings]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{result.stderr}")
    return json.loads(result.stdout)["step_s"]


def measured(settings, steps):
    with tempfile.TemporaryDirectory() as folder:
        command = [TITAN, "train", "configs/llama3_debug.toml", "--nproc", str(RANKS), "--job.dump_folder", folder, "--training.steps", str(steps), *settings]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{result.stderr[-2000:]}")
        rows = [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["step_s"] for row in rows if "step_s" in row]
    return min(seconds[2:])  # other processes only make a step longer


def measured_twice(sizes, steps, runs):
    """Two lists with the least seconds of each layout."""
    least = [[float("inf")] * len(LAYOUTS) for _ in range(2)]
    for run in range(2 * runs):
        of_run = least[run % 2]
        for place, settings in enumerate(LAYOUTS.values()):
            of_run[place] = min(of_run[place], measured(settings + sizes, steps))
        print(f"round {run + 1} of {2 * runs}", file=sys.stderr)
    return least


def order(values):
    """Ranks, with the mean for equal values."""
    places = sorted(range(len(values)), key=lambda i: values[i])
    result = [0.0] * len(values)
    for i in range(len(places)):
        equal = [j for j in range(len(places)) if values[places[j]] == values[places[i]]]
        result[places[i]] = statistics.mean(equal)
    return result


def spearman(a, b):
    return statistics.correlation(order(a), order(b))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=5, help="of a run; the first two don't count")
    parser.add_argument("--runs", type=int, default=3, help="of each layout in each of the two measurements")
    parser.add_argument("--device", help="a device file in place of a calibration")
    arguments = parser.parse_args()
    if arguments.steps < 3 or arguments.runs < 1:
        parser.error("at least 3 steps and 1 run")
    with tempfile.TemporaryDirectory() as folder:
        device = arguments.device
        if not device:
            device = str(pathlib.Path(folder) / "machine.toml")
            subprocess.run([TITAN, "plan", "--calibrate", device, "--world", str(RANKS)], cwd=ROOT, check=True, capture_output=True)
        for size, sizes in SIZES.items():
            plans = [planned(settings + sizes, device) for settings in LAYOUTS.values()]
            first, second = measured_twice(sizes, arguments.steps, arguments.runs)
            print(f"\n{size}\n\n| layout | planned | measured | again |\n| --- | --- | --- | --- |")
            for name, plan, one, two in sorted(zip(LAYOUTS, plans, first, second), key=lambda row: row[1]):
                print(f"| {name} | {1e3 * plan:.0f} ms | {1e3 * one:.0f} ms | {1e3 * two:.0f} ms |")
            of_plan, of_both = min(spearman(plans, first), spearman(plans, second)), spearman(first, second)
            print(f"\nSpearman's correlation: {spearman(plans, first):.3f} and {spearman(plans, second):.3f}; of the two measurements: {of_both:.3f}: "
                  f"{'good' if of_plan >= min(0.9, of_both) else 'not good'}", flush=True)


if __name__ == "__main__":
    main()
