#!/usr/bin/env python3
"""Plans Llama 3.1 from 8 to 16,384 devices, and writes the tables of docs/scaling.md.

    scripts/plan_scaling.py [--models 8B,70B] [--jobs N]    prints the tables
    scripts/plan_scaling.py --write                         writes them into docs/scaling.md, too
    scripts/plan_scaling.py --check                         fails if docs/scaling.md has others, by more than 1 %
    scripts/plan_scaling.py --plans FILE                    keeps the plans in a file, and makes only those that it hasn't got

Each layout of LAYOUTS is planned with micro-batches of 4, 2 and 1 sequences, each with the least recompute that fits (none, selective by operation,
full; not none for 405B), and the fastest counts. In a pipeline micro-batches are of one sequence, unless that takes too long to plan."""

import argparse
import concurrent.futures
import difflib
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TITAN = ROOT / "build/bin/titan"
DEVICE, SEQUENCE = "h100", 8192
WORLDS = [8, 64, 512, 2048, 16384]
LAYERS = {"8B": 32, "70B": 80, "405B": 126}
MOST_LAYERS = 5120  # times micro-batches of a step, in pipelines half as many; more take minutes to plan

# Degrees of tensor, context and pipeline parallelism, "stages" of each pipeline rank, and "shard", the ranks that share parameters (without it all,
# with it HSDP).
LAYOUTS = {
    "8B": [{}, {"shard": 8}, {"shard": 64}, {"tp": 8}, {"tp": 4, "shard": 32}, {"cp": 4}, {"tp": 2, "cp": 2, "shard": 32},
           {"tp": 8, "cp": 4, "shard": 2}, {"tp": 4, "cp": 8, "pp": 4, "stages": 4, "shard": 8}],
    "70B": [{}, {"shard": 64}, {"tp": 2}, {"tp": 2, "shard": 64}, {"tp": 4}, {"tp": 4, "shard": 64}, {"tp": 8}, {"tp": 8, "shard": 32},
            {"tp": 8, "cp": 2, "shard": 8}, {"tp": 4, "cp": 4, "pp": 4, "stages": 5, "shard": 16}],
    "405B": [{"tp": 4}, {"tp": 4, "shard": 128}, {"tp": 8}, {"tp": 8, "shard": 64}, {"tp": 8, "cp": 2, "shard": 32}, {"tp": 8, "pp": 8, "stages": 4},
             {"tp": 8, "cp": 2, "pp": 8, "stages": 4}],
}
PARAMS = {"8B": 8.03e9, "70B": 70.6e9, "405B": 405.9e9}
STATE_BYTES, DEVICE_GIB = 16, 78.6  # parameters, gradients and optimizer in fp32; what a plan may use
STRONG_TOKENS = {"8B": 4 << 20, "70B": 8 << 20, "405B": 16 << 20}  # in a step
WEAK_TOKENS = {"8B": 8192, "70B": 2048, "405B": 1024}  # in a step, on each device


def text_of(layout):
    words = [f"{key.upper()} {layout[key]}" for key in ("tp", "cp", "pp") if key in layout]
    if "stages" in layout:
        words[-1] += f" ({layout['stages']} stages a rank)"
    return ", ".join([f"HSDP {layout['shard']}" if "shard" in layout else "FSDP"] + words)


def candidates(model, layout, world, tokens):
    """Commands of titan plan for each micro-batch, with more and more recompute; or why there is none."""
    tp, cp, pp = (layout.get(key, 1) for key in ("tp", "cp", "pp"))
    replicas, rest = divmod(world, tp * cp * pp)
    shard = layout.get("shard", replicas)
    states = STATE_BYTES * PARAMS[model] / world / 2**30
    if states > DEVICE_GIB:
        return [], f"its states alone take {states:.0f} GiB"
    if rest or replicas < 1:
        return [], f"needs a multiple of {tp * cp * pp} devices"
    if replicas % shard or ("shard" in layout and replicas == shard):
        return [], "has no second replica"
    sequences = tokens / SEQUENCE / replicas
    if sequences < 1:
        return [], "has too few sequences"
    sequences = int(sequences)
    command = [f"configs/llama3_{model.lower()}.toml", "--world", str(world), "--device", DEVICE, "--parallelism.data_parallel_shard_degree", str(shard),
               "--parallelism.data_parallel_replicate_degree", str(replicas // shard), "--parallelism.tensor_parallel_degree", str(tp),
               "--parallelism.context_parallel_degree", str(cp), "--parallelism.pipeline_parallel_degree", str(pp)]
    if tp > 1:
        command += ["--parallelism.enable_async_tensor_parallel"]
    if pp > 1:
        less = LAYERS[model] % pp > 0  # the first and the last stage have a layer less, and the embedding and the loss
        command += ["--parallelism.pipeline_parallel_schedule", "Interleaved1F1B", "--parallelism.pipeline_parallel_layers_per_stage",
                    str((LAYERS[model] + 2 * less) // (pp * layout["stages"])), "--parallelism.pipeline_parallel_first_stage_less_layers", str(int(less)),
                    "--parallelism.pipeline_parallel_last_stage_less_layers", str(int(less))]
    most = MOST_LAYERS // LAYERS[model] // (2 if pp > 1 else 1)
    micro_batches = [size for size in (1, 2, 4) if sequences % size == 0 and size <= 2 * tp and sequences // size <= most]
    if not micro_batches:
        return [], f"has more than {most} micro-batches"
    micro_batches = micro_batches[:1] if pp > 1 else micro_batches[::-1]
    recomputes = ("selective", "full") if model == "405B" else ("none", "selective", "full")
    result = []
    for size in micro_batches:
        batch = ["--training.local_batch_size", str(sequences if pp > 1 else size), "--training.global_batch_size", str(tokens // SEQUENCE)]
        if pp > 1:
            batch += ["--parallelism.pipeline_parallel_microbatch_size", str(size)]
        result.append([{"micro_batch": size, "recompute": recompute,
                        "command": command + batch + ["--activation_checkpoint.mode", recompute, "--activation_checkpoint.selective_ac_option", "op"]}
                       for recompute in recomputes])
    return result, ""


def plan(command, plans, file):
    key = " ".join(command)
    if key not in plans:
        # With --for-run, a plan that doesn't fit looks for no changes, which takes longer than the plan.
        result = subprocess.run([str(TITAN), "plan", *command, "--for-run", str(os.getpid()), "--json"], cwd=ROOT, capture_output=True, text=True)
        if result.returncode == 0:
            whole = json.loads(result.stdout)
            plans[key] = {name: whole[name] for name in ("fits", "step_s", "tokens_per_s_per_device", "mfu", "time")}
            plans[key]["peak_gib"] = whole["memory"]["peak_gib"]
        else:
            plans[key] = {"error": result.stderr.strip()}
        print(key, json.dumps(plans[key]), file=sys.stderr, flush=True)
        if file:
            file.write_text(json.dumps(plans, indent=1))
    return plans[key]


def best_of(model, layout, world, tokens, plans, file):
    """The layout's fastest plan that fits, or why there is none."""
    sizes, why = candidates(model, layout, world, tokens)
    best, least, levels = None, None, 3
    for size in sizes:
        for level, candidate in enumerate(size[:levels]):
            answer = candidate | plan(candidate["command"], plans, file)
            if "error" in answer:
                why = why or "is refused: " + answer["error"].splitlines()[0]
                continue
            least = min(least or answer["peak_gib"], answer["peak_gib"])
            if answer["fits"]:
                levels = level  # smaller micro-batches are faster only with less recompute
                if not best or answer["tokens_per_s_per_device"] > best["tokens_per_s_per_device"]:
                    best = answer
                break
    return best or {"why": f"takes {least:.0f} GiB" if least else why}


def tables(model, scaling, answers):
    """The best layout at each size, and all of them."""
    lines = ["| devices | fastest layout | micro-batch, recompute | GiB | tokens/s of a device | MFU | efficiency | computing | of the peak meanwhile | waits for communication | bubble |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    first = None
    for world in WORLDS:
        fitting = [(layout, answers[layout, world]) for layout in map(text_of, LAYOUTS[model]) if "step_s" in answers[layout, world]]
        if not fitting:
            lines.append(f"| {world:,} | none fits | | | | | | | | | |")
            continue
        layout, answer = max(fitting, key=lambda each: each[1]["tokens_per_s_per_device"])
        first = first or answer
        share = {name: seconds / answer["step_s"] for name, seconds in answer["time"].items()}
        lines.append(f"| {world:,} | {layout} | {answer['micro_batch']}, {answer['recompute']} | {answer['peak_gib']:.0f} | "
                     f"{answer['tokens_per_s_per_device']:,.0f} | {100 * answer['mfu']:.1f} % | "
                     f"{100 * answer['tokens_per_s_per_device'] / first['tokens_per_s_per_device']:.0f} % | {100 * share['compute']:.0f} % | "
                     f"{100 * answer['mfu'] / share['compute']:.0f} % | {100 * share['exposed_communication']:.0f} % | {100 * share['bubble']:.0f} % |")
    lines += ["", "Tokens/s of a device, of all layouts:", "", "| layout | " + " | ".join(f"{world:,}" for world in WORLDS) + " |",
              "| --- |" + " --- |" * len(WORLDS)]
    for layout in map(text_of, LAYOUTS[model]):
        row = [answers[layout, world] for world in WORLDS]
        lines.append(f"| {layout} | " + " | ".join(f"{answer['tokens_per_s_per_device']:,.0f}" if "step_s" in answer else answer["why"] for answer in row) + " |")
    return "\n".join(lines) + "\n"


NUMBER = re.compile(r"[0-9][0-9,]*(?:\.[0-9]+)?")


def agree(written, planned):
    """Whether tables differ by 1 % at most, or by one in the last place, and have the same micro-batches."""
    written, planned = (re.sub(r"\d+(?=, (none|selective|full))", lambda size: "#" * int(size[0]), text) for text in (written, planned))
    if NUMBER.split(written) != NUMBER.split(planned):
        return False
    for a, b in zip(NUMBER.findall(written), NUMBER.findall(planned)):
        last_place = 10.0 ** -len(a.partition(".")[2])
        a, b = (float(number.replace(",", "")) for number in (a, b))
        if abs(a - b) > max(1.001 * last_place, 0.01 * a):
            return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="8B,70B,405B")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--plans", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check and arguments.write:
        sys.exit("--check and --write exclude each other")
    plans = json.loads(arguments.plans.read_text()) if arguments.plans and arguments.plans.exists() else {}
    page = ROOT / "docs/scaling.md"
    is_as_written = True
    for model in arguments.models.split(","):
        for scaling in ("weak", "strong"):
            cases = [(layout, world, WEAK_TOKENS[model] * world if scaling == "weak" else STRONG_TOKENS[model]) for layout in LAYOUTS[model] for world in WORLDS]
            with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
                found = pool.map(lambda case: best_of(model, *case, plans, arguments.plans), cases)
                answers = {(text_of(layout), world): answer for (layout, world, _), answer in zip(cases, found)}
            table = tables(model, scaling, answers)
            begin, end = f"<!-- {model} {scaling} -->\n\n", f"\n<!-- end of {model} {scaling} -->\n"
            before, rest = page.read_text().split(begin)
            written, after = rest.split(end)
            if arguments.check:
                if agree(written, table):
                    continue
                is_as_written = False
                sys.stdout.writelines(difflib.unified_diff(written.splitlines(True), table.splitlines(True), "docs/scaling.md", f"{model}, {scaling}"))
            else:
                print(f"{model}, {scaling}\n\n{table}")
            if arguments.write:
                page.write_text(before + begin + table + end + after)
    if not is_as_written:
        sys.exit("docs/scaling.md has other tables than these plans: if they are meant to differ, run scripts/plan_scaling.py --write")


if __name__ == "__main__":
    main()
