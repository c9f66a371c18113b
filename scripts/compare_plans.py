#!/usr/bin/env python3
"""Compares titan plan with published runs, and writes the table of docs/plan.md.

    scripts/compare_plans.py [--only ID,ID] [--jobs N]     prints the table
    scripts/compare_plans.py --write                       writes it into docs/plan.md, too

The runs, their sources and how each is planned stand in benchmarks/published_runs.json. An adjustment adds to the planned step what a run did
and the program doesn't do, item by item (ADJUSTMENTS below)."""

import argparse
import concurrent.futures
import json
import pathlib
import re
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TITAN = ROOT / "build/bin/titan"
BEGIN, END = "<!-- published runs -->\n", "<!-- end of published runs -->\n"


def device_of(name):
    text = (ROOT / f"configs/devices/{name}.toml").read_text()
    number = lambda key: float(re.search(rf"^{key} = ([\d.]+)", text, re.M).group(1))
    power = re.search(r"^power = ([\d.]+)", text, re.M)
    return {"bytes_per_s": 0.9e9 * number("memory_gb_per_s"), "flops": 1e12 * number("bfloat16"),
            "power": float(power.group(1)) if power else 1.0}


def no_overlap(plan, device, item):
    """The run computed and communicated one after the other."""
    time = plan["time"]
    return {"communication that the plan hides": time["communicating"] - time["exposed_communication"]}


def gpt(plan, device, item):
    """GPT blocks of 2022 in place of Llama's with products of the same size: attention in separate kernels over stored scores, dropout, and layer
    norms that every tensor-parallel rank computes whole where there is no sequence parallelism."""
    rate = device["bytes_per_s"]
    scores = item["micro_batch"] * item["heads"] / item["tensor"] * item["sequence"] ** 2
    # Bytes of an element of the scores. Forward: written by the product (2), scale, mask and softmax (2 + 2), dropout (2 + 2 + 1), read by the
    # product with the values (2). It is computed again before the backward, which reads and writes dropout's gradient (2 + 1 + 2), softmax's
    # (2 + 2 + 2), the gradients' products (2 + 2) and the probabilities (2).
    forward, backward = 13, 17
    attention = scores * (2 * forward + backward) / rate
    head = item["hidden"] / item["heads"]
    # Products over the whole square, at 60 % of the peak, where FlashAttention's, which the plan has, see the causal half: 2 forward (twice) and 4
    # backward, against 2 forward (twice with full recompute) and 5 backward.
    product = 2 * scores * head / device["flops"]
    squares = product * 8 / 0.6
    runs = 2 if item["full_recompute"] else 1
    flash = product / 2 * (2 * runs / 0.55 + 5 / 0.48) / device["power"] / (head / 128) ** 0.4
    # Each pass reads or writes the hidden states once: dropouts and sums that aren't fused with the norms, 3 passes forward and 5 backward.
    hidden = 2 * item["micro_batch"] * item["sequence"] * item["hidden"]
    passes = (3 * 2 + 5) / item["tensor"]
    if item["full_recompute"]:  # 11 passes forward, twice, and 11 backward, on every rank
        passes += 33 * (1 - 1 / item["tensor"])
    rest = hidden * passes / rate
    # The program's norms of rows above 32 kB are single operations: about 46 more passes for each of a layer's two, over this rank's tokens.
    whole_norms = 2 * 46 * hidden / item["tensor"] / rate if item["hidden"] > 16384 else 0
    rounds = item["micro_batches"] + (item["pipeline"] - 1) / item["chunks"]
    scale = rounds * item["layers_of_rank"]
    return {"stored scores of attention": scale * attention, "their products": scale * squares,
            "FlashAttention, which it had not": -scale * flash, "dropout and whole norms": scale * rest,
            "unfused norms of the plan": -scale * whole_norms}


ADJUSTMENTS = {"no_overlap": no_overlap, "gpt": gpt}


def planned(run):
    command = [str(TITAN), "plan", "--world", str(run["world"]), "--device", run["device"], "--kernels", run["kernels"], "--json"]
    result = subprocess.run(command + run["settings"], cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        return {"id": run["id"], "error": result.stderr.strip()}
    plan = json.loads(result.stdout)
    seconds = plan["step_s"]
    tokens = plan["tokens_per_s_per_device"] * plan["step_s"]
    items = {}
    for adjustment in run["adjustments"]:
        items |= ADJUSTMENTS[adjustment["kind"]](plan, device_of(run["device"]), adjustment)
    seconds += sum(items.values())
    value = seconds if run["unit"] == "s" else tokens / seconds
    return {"id": run["id"], "value": value, "items": items, "step_s": plan["step_s"], "time": plan["time"], "peak_gib": plan["memory"]["peak_gib"],
            "fits": plan["fits"]}


def number(value, unit):
    return f"{value:,.2f} s" if unit == "s" else f"{value:,.0f}" if value > 300 else f"{value:,.1f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--runs", default=ROOT / "benchmarks/published_runs.json")
    arguments = parser.parse_args()
    runs = json.loads(pathlib.Path(arguments.runs).read_text())
    if arguments.only:
        runs = [run for run in runs if run["id"] in arguments.only.split(",")]
    lines = ["| run | GPUs | planned | published | error | |", "| --- | --- | --- | --- | --- | --- |"]
    errors = []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for run, plan in zip(runs, pool.map(planned, runs)):
            if "error" in plan:
                print(run["id"], run["title"], plan["error"], file=sys.stderr)
                continue
            print(run["id"], run["title"], json.dumps(plan), file=sys.stderr)
            measured = run.get("published")
            error = plan["value"] / measured - 1 if measured else None
            if measured and not run["fit"]:
                errors.append(abs(error))
            notes = ["used to fit"] if run["fit"] else []
            notes += [f"{name} {1e3 * seconds:+,.0f} ms" for name, seconds in plan["items"].items()]
            notes += [run["note"]] if "note" in run else []
            lines.append(f"| {run['source']}: {run['title']} | {run['world']} x {run['device']} | {number(plan['value'], run['unit'])} | "
                         f"{number(measured, run['unit']) if measured else ''} | {f'{100 * error:+.1f} %' if measured else ''} | {'; '.join(notes)} |")
    table = "\n".join(lines) + "\n"
    if errors:
        table += (f"\nOf the {len(errors)} runs that weren't used to fit, the median error is {100 * statistics.median(errors):.1f} %, "
                  f"the largest {100 * max(errors):.1f} %.\n")
    print(table)
    if arguments.write:
        page = ROOT / "docs/plan.md"
        text = page.read_text()
        before, rest = text.split(BEGIN)
        page.write_text(before + BEGIN + "\n" + table + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
