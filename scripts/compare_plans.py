#!/usr/bin/env python3
"""Compares titan plan with published runs, and writes the tables of docs/plan.md: of time, and of memory.

    scripts/compare_plans.py [--only ID,ID] [--jobs N]     prints the tables
    scripts/compare_plans.py --memory                      only the table of memory
    scripts/compare_plans.py --write                       writes them into docs/plan.md, too
    scripts/compare_plans.py [--memory] --check            fails if a row of docs/plan.md has another number than the plan now, or errors are too large;
                                                           of time, without the rows that take more than a minute: --check --slow takes those
    scripts/compare_plans.py --ours [--check]              the tables of LibTitan's own speed beside published runs; --check leaves out the same rows

The runs, their sources and how each is planned stand in benchmarks/published_runs.json. An adjustment adds to the planned step, or to the planned
memory, what a run did or kept and the program doesn't, item by item (ADJUSTMENTS and MEMORY_ADJUSTMENTS below)."""

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
GIB = 2**30
MARKERS = {"ours": ("<!-- published runs with our kernels -->\n", "<!-- end of published runs with our kernels -->\n"),
           "jobs": ("<!-- our jobs -->\n", "<!-- end of our jobs -->\n"),
           "time": ("<!-- published runs -->\n", "<!-- end of published runs -->\n"),
           "memory": ("<!-- published memory -->\n", "<!-- end of published memory -->\n")}


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


# ---- memory. Sizes are of one rank; "tensor" and the like are degrees, and "layers" those of a rank.


def layers_in_flight(item):
    """Layers with activations on the first pipeline rank, counted once for each micro-batch."""
    depth = item["pipeline"]
    return item["layers"] * (depth + (depth - 1) / item["chunks"] if item["chunks"] > 1 else depth)


def megatron_core(role, point, item):
    """Megatron-Core with Transformer Engine: bf16 parameters, fp32 gradients, and 12 bytes of each parameter's state divided by data parallelism."""
    tensor, hidden, rank = item["tensor"], item["hidden"], min(role["rank"] * item["pipeline"] // 8, item["pipeline"] - 1)
    module = point["module"]
    # The embedding's gradient comes when a micro-batch's layers have been freed.
    in_flight = item["pipeline"] - rank - (rank == 0 and module == "")
    layers = item["layers"] * in_flight
    tokens_bytes = 2 * item["sequence"]
    matrices = 2 * hidden * hidden + 2 * hidden * item["kv"] + 3 * hidden * item["ffn"]
    head = item["vocab"] * hidden / tensor
    is_last = rank == item["pipeline"] - 1
    items = {
        # It reduces within the buffer of gradients (param_and_grad_buffer.py); FSDP's shards have gradients of their own.
        "gradients of shards": -point["categories"]["parameters"] if item["data"] > 1 else 0,
        # It keeps its part of each norm's output, and gathers again in the backward (layers.py).
        "gathered inputs": -2 * layers * tokens_bytes * hidden * (1 - 1 / tensor),
        # It keeps the product; the plan has it only for the layer whose backward runs.
        "SwiGLU's products": (layers - bool(re.match(r"layers.* backward", module))) * tokens_bytes * item["ffn"] / tensor,
        # get_dummy_wgrad keeps one bf16 tensor for each shape of a weight whose gradient is summed in place.
        "dummy gradients": 2 * matrices / tensor + (2 * head if is_last else 0),
        # The plan's loss head makes a gradient in fp32 (ops/loss.cpp), which lives until FSDP adds it, in a pipeline until the optimizer's step.
        # Megatron's product adds to the buffer.
        "the head's fp32 gradient": -4 * head if is_last else 0,
        # The plan's embedding makes a whole gradient in fp32, Megatron's in bf16.
        "the embedding's fp32 gradient": -2 * head if rank == 0 and module == "" else 0,
    }
    return {name: round(size) for name, size in items.items() if size}


def gpt_states(role, point, item):
    """18 bytes for each of 12 h^2 parameters of a layer."""
    params, hidden = point["categories"]["parameters"] / 4, item["hidden"]
    others = 2 * hidden * item["layers"]  # norms
    if item["pipeline"] == 1:
        others += 2 * item["vocab"] * hidden / item["tensor"] + hidden
    larger = 3 * hidden * (item["ffn"] - 8 * hidden / 3) * item["layers"] / item["tensor"]  # the width is rounded to 32
    items = {"weights in 16 bits": 2 * params, "embedding, output and norms, which it leaves out": -18 * others, "rounded width": -18 * larger}
    return {name: round(size) for name, size in items.items() if abs(size) >= 0.005 * GIB}


def gpt_block(role, point, item):
    """With sequence parallelism, and what is recomputed left out: 34 s b h / t bytes of a layer."""
    layers, part = layers_in_flight(item), item["tokens"] * item["hidden"] / item["tensor"]
    return {"gathered inputs": -2 * layers * 2 * part * (item["tensor"] - 1), "masks of dropout": 2 * layers * part,
            "GeLU of 4 h, its input and output": layers * (16 * part - 4 * item["tokens"] * item["ffn"] / item["tensor"])}


def gpt_scores(role, point, item):
    """Without either: whole norms, residuals and masks on each rank, and scores."""
    layers, part = layers_in_flight(item), item["tokens"] * item["hidden"] / item["tensor"]
    return {"whole norms, residuals and masks": layers * 10 * part * (item["tensor"] - 1),
            "scores, softmax and its mask": layers * 5 * item["heads"] / item["tensor"] * item["tokens"] * item["sequence"]}


def bytes_of_module(role, index, matches, categories=("activations",)):
    """At a point of over_time."""
    total = 0
    for owner in role["by_module"]:
        if owner["category"] in categories and matches(owner["module"]):
            total += next((size for at, size in reversed(owner["changes"]) if at <= index), 0)
    return total


def torchtitan(role, point, item):
    """The loss in TorchTitan of December 2024: whole logits, in separate operations (torchtitan/train.py, F.cross_entropy of fp32 logits)."""
    if point["module"] != "output":
        return {}
    index = role["over_time"].index(point)
    items = {
        # In the backward of the loss: what log_softmax kept, and the gradients of its output and its input. The bf16 logits have been freed.
        "logits in fp32, three times": 3 * 4 * item["tokens"] * item["vocab"] / item["tensor"],
        # LibTitan's head computes the loss by parts of the sequence.
        "the plan's own head": -bytes_of_module(role, index, lambda module: module == "output"),
    }
    if layer := item.get("selective"):
        # Every second product's output (wq, wv, w1, w2 of seven), attention's, the rows' statistics of attention, and the block's input.
        kept = 2 * (4 * item["hidden"] + layer["kv"] + layer["ffn"]) + 4 * layer["heads"]
        items["what its policy keeps of layers"] = (kept * item["tokens"] * layer["layers"]
                                                    - bytes_of_module(role, index, lambda module: re.match(r"layers\.", module)))
    return items


MEMORY_ADJUSTMENTS = {"torchtitan": torchtitan, "megatron_core": megatron_core, "gpt_states": gpt_states, "gpt_block": gpt_block, "gpt_scores": gpt_scores}


def saved_by_layers(role):
    """Bytes that layers' forwards and inputs keep when the first backward begins. Gathered inputs count as communication."""
    modules = r"layers\.(?!.* backward)|rotary$|tok_embeddings$|action \d+RECV_F"
    return bytes_of_module(role, role["backward_point"], lambda module: re.match(modules, module), ("activations", "communication"))


def planned_memory(plan, entry):
    """The plan's number, in bytes, and the adjustments to it."""
    roles = plan["memory"]["by_role"]
    if entry["number"] == "reserved":
        # The allocator has as much more than tensors take as at the plan's own peak.
        points = [(role, point) for role in roles for point in [role["at_peak"]] + role["over_time"] if point["step"] == 2]
        value = lambda role, point: point["bytes"] + role["peak_reserved_bytes"] - role["peak_allocated_bytes"]
    elif entry["number"] == "allocated":  # the point with most, after adjustment
        points = [(role, point) for role in roles for point in [role["at_peak"]] + role["over_time"] if point["step"] == 2]
        value = lambda role, point: point["bytes"]
    else:
        has_middle = len(roles) > 3
        role = roles[1] if has_middle and entry["number"] == "states" else roles[0]
        points = [(role, role["at_peak"])]
        states = ("parameters", "gradients", "optimizer")
        value = lambda role, point: (sum(point["categories"][name] for name in states) if entry["number"] == "states" else saved_by_layers(role))
    best = None
    for role, point in points:
        items = {}
        for item in entry.get("adjustments", []):
            items |= MEMORY_ADJUSTMENTS[item["kind"]](role, point, item)
        if best is None or value(role, point) + sum(items.values()) > best[0] + sum(best[1].values()):
            best = value(role, point), items
    if entry["number"] == "reserved":  # the table shows the plan's own peak, and what is missing from it
        peak = max(role["peak_reserved_bytes"] for role in roles)
        moment = {"the plan at the loss, not at its peak": best[0] - peak} if best[1] and best[0] != peak else {}
        return peak, moment | best[1]
    return best


def plan_of(run, settings):
    command = [str(TITAN), "plan", "--world", str(run["world"]), "--device", run["device"], "--kernels", run["kernels"], "--json"]
    result = subprocess.run(command + settings, cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        raise ValueError(result.stderr.strip())
    return json.loads(result.stdout)


def with_more_micro_batches(run, plan):
    """The plan of a run with more micro-batches than can be planned in minutes: in a pipeline's steady state, further ones take as long as those between
    two plans did."""
    key, fewer, planned, in_run = (run["micro_batches"][name] for name in ("key", "fewer", "planned", "run"))
    settings = list(run["settings"])
    assert settings[settings.index(key) + 1] == str(planned)
    settings[settings.index(key) + 1] = str(fewer)
    few = plan_of(run, settings)
    more = (in_run - planned) / (planned - fewer)
    time = {name: seconds + more * (seconds - few["time"][name]) for name, seconds in plan["time"].items()}
    # Further micro-batches have no bubble of their own, so it is the difference of nearly equal numbers.
    assert min(time.values()) > -0.01 * plan["step_s"], time
    step_s = plan["step_s"] + more * (plan["step_s"] - few["step_s"])
    faster = in_run / planned * plan["step_s"] / step_s
    return plan | {"time": time, "step_s": step_s, "mfu": plan["mfu"] * faster, "tokens_per_s_per_device": plan["tokens_per_s_per_device"] * faster}


def planned(run, memory_only):
    # Memory doesn't depend on micro-batches beyond those that fill a pipeline.
    settings = run.get("memory_settings", run["settings"]) if memory_only else run["settings"]
    try:
        plan = plan_of(run, settings)
        if "micro_batches" in run and not memory_only:
            plan = with_more_micro_batches(run, plan)
    except ValueError as error:
        return {"id": run["id"], "error": str(error)}
    seconds = plan["step_s"]
    tokens = plan["tokens_per_s_per_device"] * plan["step_s"]
    items = {}
    for adjustment in run["adjustments"]:
        items |= ADJUSTMENTS[adjustment["kind"]](plan, device_of(run["device"]), adjustment)
    seconds += sum(items.values())
    value = seconds if run["unit"] == "s" else tokens / seconds
    return {"id": run["id"], "value": value, "items": items, "step_s": plan["step_s"], "time": plan["time"], "mfu": plan["mfu"], "peak_gib": plan["memory"]["peak_gib"],
            "fits": plan["fits"], "memory": [planned_memory(plan, entry) for entry in run.get("memory", [])]}


def number(value, unit):
    return f"{value:,.2f} s" if unit == "s" else f"{value:,.0f}" if value > 300 else f"{value:,.1f}"


def place(run):
    return f"{run['source']}: {run['title']} | {run['world']} x {run['device']}"


def to_be_above(plan, published):
    """The changes of the planned step that would give more tokens/s than were published."""
    ratio = plan["value"] / published
    if ratio > 1:
        return f"nothing: a step may take {100 * (ratio - 1):.0f} % longer"
    time, step = plan["time"], plan["step_s"]
    missing = 1 - ratio
    waits = {"exposed communication": time["exposed_communication"] / step, "the bubble": time["bubble"] / step}
    kernels = {"products": time["products"] / step, "attention": time["attention"] / step,
               "other kernels": (time["compute"] - time["products"] - time["attention"]) / step}

    def faster(missing):
        words = [f"{name} {100 * (1 / (1 - missing / share) - 1):.0f} %" for name, share in kernels.items() if share > 2 * missing]  # at most twice as fast
        return " or ".join(words + [f"all of them {100 * (1 / (1 - missing / sum(kernels.values())) - 1):.1f} %"]) + " faster"

    left = missing - sum(waits.values())
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in (waits | kernels).items() if share >= 0.005)
    text = f"{100 * missing:.1f} % of the step must go; of it are {shares}. So {faster(missing)}"
    if sum(waits.values()) >= 0.005:
        text += ", or without waits " + (faster(left) if left > 0 else "alone")
    return text


def our_table(runs, plans):
    lines = ["| run | GPUs | LibTitan, planned | published | ratio | MFU | exposed communication | bubble | what must change to be above |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for run, plan in zip(runs, plans):
        share = lambda what: f"{100 * plan['time'][what] / plan['step_s']:.0f} %"
        title = f"{run['source'].split(',')[0]}: {run['title'].replace(', eager', ' in eager mode').replace(', compiled', '')}"
        lines.append(f"| {title} | {run['world']} x {run['device']} | {number(plan['value'], run['unit'])} | {number(run['published'], run['unit'])} | "
                     f"{plan['value'] / run['published']:.2f} | {100 * plan['mfu']:.0f} % | {share('exposed_communication')} | {share('bubble')} | "
                     f"{to_be_above(plan, run['published'])} |")
    return "\n".join(lines) + "\n"


# LibTitan's own jobs: what the page calls them, their settings, and published runs (ids) of the same model, mostly on other machines.
FLOAT8 = "--model.converters quantize.linear.float8"
JOBS = [
    ("8B on 8 H100", "h100", 8, "configs/llama3_8b.toml --activation_checkpoint.mode none --training.local_batch_size 2", ["r02"]),
    ("8B on 8 H100, Float8", "h100", 8, f"configs/llama3_8b.toml --activation_checkpoint.mode none --training.local_batch_size 2 {FLOAT8}",
     ["r03", "r61"]),
    ("8B on one H200", "h200", 1, "configs/llama3_8b.toml --activation_checkpoint.mode none --optimizer.state_dtype bfloat16", []),
    ("8B on one H200, Float8", "h200", 1, f"configs/llama3_8b.toml --activation_checkpoint.mode none --optimizer.state_dtype bfloat16 {FLOAT8}", []),
    ("1.5B on one H200", "h200", 1, "configs/llama3_8b.toml --model.flavor 1B --model.args.tie_embeddings=false --training.local_batch_size 4 --activation_checkpoint.mode none", []),
    ("1.5B on one H200, Float8", "h200", 1,
     f"configs/llama3_8b.toml --model.flavor 1B --model.args.tie_embeddings=false --training.local_batch_size 4 --activation_checkpoint.mode none {FLOAT8}", []),
    ("70B on 256 H100", "h100", 256, "configs/llama3_70b.toml --activation_checkpoint.mode none --training.local_batch_size 1 "
     "--parallelism.tensor_parallel_degree 4 --parallelism.enable_async_tensor_parallel", ["r14"]),
    ("70B on 256 H100, Float8", "h100", 256, "configs/llama3_70b.toml --activation_checkpoint.mode full --training.local_batch_size 2 "
     f"--parallelism.tensor_parallel_degree 1 {FLOAT8} --quantize.linear.float8.enable_fsdp_float8_all_gather", ["r16", "r62"]),
    ("405B on 512 H100", "h100", 512, "configs/llama3_405b.toml --activation_checkpoint.mode full --training.local_batch_size 4 "
     "--parallelism.tensor_parallel_degree 4", []),
    ("405B on 512 H100, Float8", "h100", 512, "configs/llama3_405b.toml --activation_checkpoint.mode full --training.local_batch_size 2 "
     f"--parallelism.tensor_parallel_degree 2 {FLOAT8}", ["r10", "r63"]),
    ("8B on 8 B200", "b200", 8, "configs/llama3_8b.toml --activation_checkpoint.mode none --training.local_batch_size 4", []),
    ("8B on 8 B200, Float8 by tensors", "b200", 8, f"configs/llama3_8b.toml --activation_checkpoint.mode none --training.local_batch_size 4 {FLOAT8}", []),
    ("8B on 8 B200, Float8 by rows", "b200", 8,
     f"configs/llama3_8b.toml --activation_checkpoint.mode none --training.local_batch_size 4 {FLOAT8} --quantize.linear.float8.recipe_name rowwise", []),
    ("8B on 8 B200, MXFP8", "b200", 8, "configs/llama3_8b.toml --activation_checkpoint.mode none --training.local_batch_size 4 --model.converters quantize.linear.mx", []),
]


def jobs_table(jobs, plans):
    lines = ["| job | settings | tokens/s of a device | MFU | GiB | published | what must change to be above |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for job, plan in zip(jobs, plans):
        others = job["others"]
        most = max(others, key=lambda run: run["published"], default=None)
        published = ", ".join(f"{run['source'].split(',')[0]} on {run['world']} x {run['device']}: {number(run['published'], run['unit'])}" for run in others)
        lines.append(f"| {job['title']} | `{' '.join(job['settings'])}` | {number(plan['value'], job['unit'])} | {100 * plan['mfu']:.1f} % | "
                     f"{plan['peak_gib']:.0f}{'' if plan['fits'] else ', which does not fit'} | {published} | "
                     f"{to_be_above(plan, most['published']) if most else ''} |")
    return "\n".join(lines) + "\n"


def our_jobs(runs):
    by_id = {run["id"]: run for run in runs}
    return [{"id": f"job{i + 1}", "title": title, "device": device, "world": world, "settings": settings.split(), "kernels": "ours", "unit": "tokens/s",
             "adjustments": [], "others": [by_id[other] for other in others]} for i, (title, device, world, settings, others) in enumerate(JOBS)]


def time_table(runs, plans):
    lines = ["| run | GPUs | planned | published | error | |", "| --- | --- | --- | --- | --- | --- |"]
    errors = []
    for run, plan in zip(runs, plans):
        measured = run.get("published")
        error = plan["value"] / measured - 1 if measured else None
        if measured and not run["fit"]:
            errors.append(abs(error))
        notes = ["used to fit"] if run["fit"] else []
        notes += [f"{name} {1e3 * seconds:+,.0f} ms" for name, seconds in plan["items"].items()]
        notes += [run["note"]] if "note" in run else []
        lines.append(f"| {place(run)} | {number(plan['value'], run['unit'])} | "
                     f"{number(measured, run['unit']) if measured else ''} | {f'{100 * error:+.1f} %' if measured else ''} | {'; '.join(notes)} |")
    table = "\n".join(lines) + "\n"
    if errors:
        table += (f"\nOf the {len(errors)} runs that weren't used to fit, the median error is {100 * statistics.median(errors):.1f} %, "
                  f"the largest {100 * max(errors):.1f} %.\n")
    return table


def memory_table(runs, plans):
    lines = ["| run | GPUs | number | plan says | adjusted | published | difference | adjustments, GiB |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    largest, of_torchtitan = 0, []
    for run, plan in zip(runs, plans):
        for entry, (value, items) in zip(run.get("memory", []), plan["memory"]):
            adjusted = (value + sum(items.values())) / GIB
            notes = [f"{name} {size / GIB:+.2f}" for name, size in items.items()]
            if entry["number"] == "reserved":
                notes.append(f"unexplained {entry['published_gib'] - adjusted:+.2f}")
                of_torchtitan.append(abs(adjusted / entry["published_gib"] - 1))
            elif items:
                largest = max(largest, abs(adjusted / entry["published_gib"] - 1))
            lines.append(f"| {place(run)} | {entry.get('title', entry['number'])} | {value / GIB:.2f} | {f'{adjusted:.2f}' if items else ''} | "
                         f"{entry['published_gib']:.2f} | {100 * (adjusted / entry['published_gib'] - 1):+.1f} % | "
                         f"{'; '.join(notes)} |")
    notes = [f"Without TorchTitan's rows, the largest difference after adjustment is {100 * largest:.1f} %."] if largest else []
    if of_torchtitan:
        above = lambda limit: sum(error > limit for error in of_torchtitan)
        notes.append(f"Of TorchTitan's {len(of_torchtitan)} rows, {above(MOST_MEMORY)} are more than {100 * MOST_MEMORY} % off even after adjustment; "
                     f"{above(0.1)} of them are more than 10 % off, the worst one {100 * max(of_torchtitan):.1f} %.")
    return "\n".join(lines) + "\n" + (f"\n{' '.join(notes)}\n" if notes else "")


MOST_DIFFERENCE = 0.002  # from the page
MOST_MEDIAN, MOST_TIME, MOST_MEMORY = 0.06, 0.15, 0.015  # errors against published numbers; of memory, without TorchTitan's rows
MOST_RESERVED = 0.25  # the same for TorchTitan's rows, which are of another program
LARGER = {"r43": 0.18, "r44": 0.18, "r72": 0.16, "r73": 0.19, "r74": 0.18, "r75": 0.24}  # errors of time; docs/plan.md explains them as far as it can
SLOW = {"r21", "r22", "r23", "r24", "r62", "r63"}


def rows_of(table, columns):
    """The planned numbers in these columns, by run and what stands before the first of them."""
    rows = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 5 and re.match(r"[\d.,]+", cells[columns[0]]):
            rows[cells[0], cells[columns[0] - 1]] = [float(cells[column].removesuffix(" s").replace(",", "")) for column in columns if cells[column]]
    return rows


def differences(name, table):
    """Between the page's table and this one, as text."""
    begin, end = MARKERS[name]
    columns = {"time": [2], "memory": [3, 4], "ours": [2], "jobs": [2]}[name]
    written = rows_of((ROOT / "docs/plan.md").read_text().split(begin)[1].split(end)[0], columns)
    problems = []
    for key, now in rows_of(table, columns).items():
        before = written.get(key, [])
        if len(before) != len(now) or any(abs(a - b) > MOST_DIFFERENCE * b + 0.005 for a, b in zip(before, now)):
            problems.append(f"{' | '.join(key)}: docs/plan.md has {before}, the plan {now}")
    return problems


def too_large(name, answered):
    """Errors above what docs/plan.md promises, as text."""
    if name == "memory":
        of_memory = [(run["title"], (value + sum(items.values())) / GIB / entry["published_gib"] - 1, entry["number"] == "reserved") for run, plan in answered
                     for entry, (value, items) in zip(run["memory"], plan["memory"]) if entry["number"] == "reserved" or items]
        return [f"{title}: memory is {100 * error:+.1f} % off" for title, error, is_reserved in of_memory if abs(error) > (MOST_RESERVED if is_reserved else MOST_MEMORY)]
    errors = {run["id"]: abs(plan["value"] / run["published"] - 1) for run, plan in answered if not run["fit"]}
    problems = [f"{name}: time is {100 * error:.1f} % off" for name, error in errors.items() if error > LARGER.get(name, MOST_TIME)]
    if not SLOW.issuperset(errors) and statistics.median(errors.values()) > MOST_MEDIAN:
        problems.append(f"the median error of time is {100 * statistics.median(errors.values()):.1f} %")
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--memory", action="store_true", help="only the table of memory, which is quicker")
    parser.add_argument("--ours", action="store_true", help="TorchTitan's and Megatron-Bridge's runs with LibTitan's kernels, and LibTitan's own jobs")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare tables with the page's")
    parser.add_argument("--slow", action="store_true", help="only the rows that take more than a minute")
    parser.add_argument("--runs", default=ROOT / "benchmarks/published_runs.json")
    arguments = parser.parse_args()
    if arguments.write and (arguments.only or arguments.check or arguments.slow):
        sys.exit("--write writes whole tables: leave out --only, --check and --slow")
    runs = json.loads(pathlib.Path(arguments.runs).read_text())
    if arguments.memory:
        runs = [run for run in runs if "memory" in run]
    if arguments.ours:
        others = [run | {"kernels": "ours"} for run in runs if run["source"].startswith(("TorchTitan", "Megatron-Bridge"))]
        runs = others + our_jobs(runs)
    if arguments.slow or (arguments.check and not arguments.memory):
        runs = [run for run in runs if (run["id"] in SLOW) == arguments.slow]
    if arguments.only:
        runs = [run for run in runs if run["id"] in arguments.only.split(",")]
    plans = []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for run, plan in zip(runs, pool.map(lambda run: planned(run, arguments.memory), runs)):
            print(run["id"], run["title"], plan.get("error") or json.dumps(plan), file=sys.stderr)
            plans.append(plan)
    answered = [(run, plan) for run, plan in zip(runs, plans) if "error" not in plan]
    wanted = ["memory"] if arguments.memory else ["time", "memory"]
    makers = {"time": time_table, "memory": memory_table}
    if arguments.ours:
        of_others, of_jobs = [[each for each in answered if ("others" in each[0]) == are_jobs] for are_jobs in (False, True)]
        tables = {name: table(*zip(*rows)) for name, table, rows in (("ours", our_table, of_others), ("jobs", jobs_table, of_jobs)) if rows}
    else:
        tables = {name: makers[name](*zip(*answered)) for name in wanted}
    for name, table in tables.items():
        print(table)
        if arguments.write:
            page = ROOT / "docs/plan.md"
            begin, end = MARKERS[name]
            before, rest = page.read_text().split(begin)
            page.write_text(before + begin + "\n" + table + "\n" + end + rest.split(end)[1])

    if arguments.check:
        checked = list(tables) if arguments.ours else wanted[:1]
        problems = [problem for name in checked for problem in differences(name, tables[name])]
        problems += [] if arguments.ours else too_large(wanted[0], answered)
        if problems:
            sys.exit("\n".join(problems + [f"scripts/compare_plans.py{' --ours' if arguments.ours else ''} --write writes the tables"]))
    if any("error" in plan for plan in plans):
        sys.exit("some runs can't be planned")


if __name__ == "__main__":
    main()
