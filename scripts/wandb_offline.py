#!/usr/bin/env python3
"""Turns a run's files into an offline Weights & Biases run. Only this script needs the package (pip install wandb).

    scripts/wandb_offline.py RUN [--output FOLDER]
    wandb sync FOLDER/wandb/offline-run-*        # later, from a machine with a network

RUN is the run's job.dump_folder: metrics.jsonl and validation.jsonl become the run's history under TorchTitan's names
(loss_metrics/global_avg_loss, ...), by step, and config.toml becomes its configuration. These variables are TorchTitan's:
WANDB_TEAM, WANDB_PROJECT (default: torchtitan), WANDB_RUN_NAME (default: the folder's name), WANDB_RUN_ID, WANDB_RUN_NOTES,
WANDB_RUN_TAGS (a comma-separated list), WANDB_RUN_GROUP, WANDB_RUN_JOB_TYPE, WANDB_RESUME_FROM, WANDB_FORK_FROM.
"""
import argparse
import json
import os
import pathlib
import sys
import tomllib

STEP_NAMES = {
    "loss": "loss_metrics/global_avg_loss",
    "max_loss": "loss_metrics/global_max_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tps": "throughput(tps)",
    "tflops": "tflops",
    "mfu": "mfu(%)",
    "percent_of_plan": "of_plan(%)",
    "step_s": "time_metrics/end_to_end(s)",
    "data_loading_s": "time_metrics/data_loading(s)",
    "checkpoint_s": "time_metrics/checkpoint(s)",
    "memory_gib": "memory/max_reserved(GiB)",
    "memory_percent": "memory/max_reserved(%)",
    "allocated_gib": "memory/max_allocated(GiB)",
    "active_gib": "memory/max_active(GiB)",
    "active_percent": "memory/max_active(%)",
    "alloc_retries": "memory/num_alloc_retries",
    "num_ooms": "memory/num_ooms",
    "n_tokens_seen": "n_tokens_seen",
    "skipped_steps": "skipped_steps",
    "startup_s": "startup_s",
}
VALIDATION_NAMES = {
    "loss": "validation_metrics/loss",
    "tps": "validation_metrics/throughput(tps)",
    "memory_gib": "validation_metrics/memory/max_reserved(GiB)",
    "memory_percent": "validation_metrics/memory/max_reserved(%)",
}


def fail(problem):
    sys.exit(f"wandb_offline.py: {problem}")


def read_rows(path):
    """The rows that have a step. Other lines are ignored, because a killed run may leave half a line at the end."""
    rows = []
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def history(run):
    """Maps each step, in ascending order, to its values under TorchTitan's names."""
    steps = {}
    for file, names in (("metrics.jsonl", STEP_NAMES), ("validation.jsonl", VALIDATION_NAMES)):
        for row in read_rows(run / file):
            values = {name: row[key] for key, name in names.items() if row.get(key) is not None}
            if row.get("data_loading_s") is not None and row.get("step_s"):
                values["time_metrics/data_loading(%)"] = 100 * row["data_loading_s"] / row["step_s"]
            steps.setdefault(row["step"], {}).update(values)
    return dict(sorted(steps.items()))


def init_arguments(run):
    variable = lambda name, default=None: os.environ.get(f"WANDB_{name}", default)
    tags = variable("RUN_TAGS")
    return {
        "entity": variable("TEAM"),
        "project": variable("PROJECT", "torchtitan"),
        "name": variable("RUN_NAME", run.resolve().name),
        "id": variable("RUN_ID"),
        "notes": variable("RUN_NOTES"),
        "tags": tags.split(",") if tags else None,
        "group": variable("RUN_GROUP"),
        "job_type": variable("RUN_JOB_TYPE"),
        "resume_from": variable("RESUME_FROM"),
        "fork_from": variable("FORK_FROM"),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, help="folder of the offline run (default: RUN)")
    arguments = parser.parse_args()
    run, output = arguments.run, arguments.output or arguments.run
    steps = history(run)
    if not steps:
        fail(f"{run} contains no run: {run / 'metrics.jsonl'} has no steps")
    try:
        import wandb
    except ImportError as error:
        fail(f"the Python package wandb can't be imported ({error}); pip install wandb")
    config = tomllib.loads((run / "config.toml").read_text(encoding="utf-8")) if (run / "config.toml").exists() else {}
    output.mkdir(parents=True, exist_ok=True)
    logged = wandb.init(mode="offline", dir=str(output), config=config, **init_arguments(run))
    for step, values in steps.items():
        logged.log(values, step=step)
    folder = logged.dir
    logged.finish()
    print(f"{len(steps)} steps in {pathlib.Path(folder).parent}; upload it with wandb sync from a machine with a network")


if __name__ == "__main__":
    main()
