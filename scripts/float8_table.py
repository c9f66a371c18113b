#!/usr/bin/env python3
"""Measures a training step's speed and memory on one GPU: LibTitan's Float8 recipes compared with bf16, and with PyTorch and torchao, eager and
compiled.

    scripts/float8_table.py [--name NAME] [--models 1b,3b,8b_8] [--recipes bf16,tensorwise,rowwise,rowwise_with_gw_hp] [--steps 5]
    scripts/float8_table.py --quick      # small, and emulated on a CPU, to check that everything works
    scripts/virtual_gpus.sh 1 -- scripts/float8_table.py --quick      # the same on a virtual GPU

"bf16:reference" is bf16 without LibTitan's kernels (ops.kernels), and "bf16:graphs" has steps as CUDA graphs (compile.enable); any
recipe takes both. "tensorwise:delayed" has delayed scales.

A row is a model with a recipe: tokens/s in the median step, the model's TFLOP/s and MFU, peak memory, the time of amax, scales and casts as a share of the time of these and
matrix products in a trace, tokens/s and memory for torchao, and LibTitan's tokens/s over those of torchao compiled, which compiles the blocks and
the loss as TorchTitan does. Each number goes to the error output as soon as it is measured, with the longest kernels of a step. Rows are measured in the
order given, traces of bf16 and tensorwise right after their rows and others after a model's rows; a run that is ended by a signal prints the table of what it has measured. The products include the loss head's, which stays in bf16, so the casts' share of
the Float8 layers alone is larger. Rescaling a product's result and laying out scales for it don't count as casts. 8b_8 is 8B's
first eight layers; embedding and output are two matrices in all models. On one rank LibTitan's FSDP keeps the bf16 copy of the weights
from step to step, while PyTorch's makes it anew; PyTorch's loss computes all logits at once, LibTitan's in chunks. PyTorch has FSDP on its one rank, too, which casts and copies parameters and
gradients there. MXFP8 recipes have no torchao columns. If a combination doesn't fit or doesn't run, its cell says so. Needs build/bin/titan and .venv. --name writes benchmarks/results/NAME.md.
"""

import argparse
import collections
import gzip
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
TITAN = REPOSITORY / "build/bin/titan"
PYTHON = os.environ.get("TITAN_PYTHON") or REPOSITORY / ".venv/bin/python"
SPEC = {"vocab_size": 128256, "n_kv_heads": 8, "multiple_of": 1024}
MODELS = {
    "1b": SPEC | {"dim": 2048, "n_layers": 16, "n_heads": 32, "ffn_dim_multiplier": 1.5},
    "3b": SPEC | {"dim": 3072, "n_layers": 28, "n_heads": 24, "ffn_dim_multiplier": 1.0},
    "8b_8": SPEC | {"dim": 4096, "n_layers": 8, "n_heads": 32, "ffn_dim_multiplier": 1.3},
    "tiny": {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 2048, "multiple_of": 32},
}
FORMS = {"reference": ["--ops.kernels", "reference"], "graphs": ["--compile.enable"]}
DELAYED = [word for of in ("input", "weight", "grad_output") for word in (f"--quantize.linear.float8.scaling_type_{of}", "delayed")]
TORCHAO = ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp")
RECIPES = (*TORCHAO, "mxfp8_cublas", "mxfp8_cublas_rceil")
# Events of a trace: kernels on a GPU, operations on a CPU. The first pattern that matches decides.
CASTS = re.compile(r"titan::float8")
ATTENTION = re.compile(r"fmha|flash|attention", re.IGNORECASE)
PRODUCTS = re.compile(r"^aten::(mm|bmm|_scaled_mm|addmm)$|gemm|nvjet|cutlass|xmma", re.IGNORECASE)
LAST = 3  # number of traced steps
FIRST_TRACED = ("bf16", "tensorwise")
LONGEST = 15  # kernels that are listed
AIMS = "1.1 times torch.compile and 50 % MFU in bf16, for 1b (1.5B parameters) and 8b_8; 744 TFLOP/s of the model in Float8"
COLUMNS = ("model", "recipe", "tokens/s", "ratio to bf16", "TFLOP/s", "MFU", "peak GiB", "casts, of casts and products", "torchao, eager: tokens/s", "GiB",
           "compiled: tokens/s", "GiB", "LibTitan / compiled")


def run(command: list, **variables: str) -> str:
    process = subprocess.run([str(word) for word in command], cwd=REPOSITORY, capture_output=True, text=True, timeout=1800, env=os.environ | variables)
    if process.returncode != 0:
        lines = (process.stderr.strip() or process.stdout.strip() or "no output").splitlines()
        raise RuntimeError(next((line for line in reversed(lines) if "rror" in line), lines[-1]))
    return process.stdout


def first_line_of(command: list) -> str:
    """The first line of what the command prints; nothing that is measured depends on it."""
    try:
        return run(command).strip().splitlines()[0]
    except (RuntimeError, OSError, IndexError):
        return "unknown"


def titan_words(model: dict, row: str, options: argparse.Namespace, folder: str) -> list:
    recipe, _, form = row.partition(":")
    words = [TITAN, "train", REPOSITORY / "benchmarks/configs/base.toml", "--job.dump_folder", folder]
    for name, value in model.items():
        words += [f"--model.args.{name}", value]
    words += ["--training.device", options.device, "--training.mixed_precision_param", "bfloat16", "--training.seq_len", options.seq_len]
    words += ["--training.local_batch_size", 1, *(FORMS | {"delayed": DELAYED}).get(form, [])]
    if recipe.startswith("mxfp8"):
        words += ["--model.converters", "quantize.linear.mx", "--quantize.linear.mx.recipe_name", recipe]
        words += ["--quantize.linear.mx.emulate"] if options.device == "cpu" else []
    elif recipe != "bf16":
        words += ["--model.converters", "quantize.linear.float8", "--quantize.linear.float8.recipe_name", recipe]
        words += ["--quantize.linear.float8.emulate"] if options.device == "cpu" else []
    return words


def times_in(folder: pathlib.Path) -> dict:
    (path,) = folder.glob("**/rank0_trace.json.gz")
    times, names = collections.Counter(), collections.Counter()
    for event in json.loads(gzip.open(path).read())["traceEvents"]:
        if event.get("cat") not in ("kernel", "cpu_op") or "dur" not in event:
            continue
        kinds = (("casts", CASTS), ("attention", ATTENTION), ("products", PRODUCTS))
        kind = next((kind for kind, pattern in kinds if pattern.search(event["name"])), "other")
        times[event["cat"], kind] += event["dur"]
        names[event["cat"], event["name"]] += event["dur"]
    where = "kernel" if any(cat == "kernel" for cat, _ in times) else "cpu_op"
    casts, products = times[where, "casts"], times[where, "products"]
    if not products:
        raise RuntimeError("the trace has no matrix products")
    longest = [(name, duration) for (cat, name), duration in names.most_common() if cat == where][:LONGEST]
    return {"casts": casts / (casts + products), "ms_of_kernels": {name[:100]: round(duration / 1000 / LAST, 3) for name, duration in longest}}


def ours(model: dict, recipe: str, options: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        words = titan_words(model, recipe, options, folder)
        run([*words, "--training.steps", options.warmup + options.steps])
        rows = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]
    rows = rows[options.warmup :]
    result = {"tokens_per_s": statistics.median(row["tps"] for row in rows), "memory": max(row["memory_gib"] for row in rows)}
    return result | {name: statistics.median(row[name] for row in rows) for name in ("tflops", "mfu") if rows[0].get(name) is not None}


def traced(model: dict, recipe: str, options: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        steps = options.warmup + 1 + LAST
        words = titan_words(model, recipe, options, folder)
        words += ["--training.steps", steps, "--profiling.enable_profiling", "--profiling.profile_freq", steps]
        run([*words, "--profiling.profiler_warmup", 1, "--profiling.profiler_active", LAST])
        return times_in(pathlib.Path(folder))


def torchao(model: dict, recipe: str, compiles: bool, options: argparse.Namespace) -> dict:
    words = [PYTHON, REPOSITORY / "benchmarks/pytorch/float8_train.py", "--args", json.dumps(model), "--recipe", recipe]
    words += ["--device", options.device, "--seq-len", options.seq_len, "--steps", options.steps, "--warmup", options.warmup]
    # On virtual GPUs: FSDP2 frees gradients on the stream that reduced them while the optimizer's may still read them. It isn't a fault, because that
    # stream waits for the optimizer's before it uses the memory again. So what the checks find is printed, and doesn't end the run.
    checks = {"VIRTUAL_GPU_RACES": "1", "VIRTUAL_GPU_FAULTS": ""} if os.environ.get("VIRTUAL_GPU_RACES") == "fatal" else {}
    result = json.loads(run(words + (["--compile"] if compiles else []), **checks).splitlines()[-1])
    return {"tokens_per_s": result["tokens_per_s"], "memory": result["peak_memory_gib"]}


def attempt(part, *arguments) -> dict:
    try:
        return part(*arguments)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {"problem": str(error)[:120].replace("|", "/")}


def measure(options: argparse.Namespace, results: dict) -> None:
    """Fills `results`, whose keys are (model, recipe, part), in the order of importance."""

    def add(model: str, recipe: str, part: str, call, *arguments) -> None:
        results[model, recipe, part] = attempt(call, MODELS[model], recipe, *arguments, options)
        print(json.dumps({"model": model, "recipe": recipe, part: results[model, recipe, part]}), file=sys.stderr, flush=True)

    for model in options.models:
        for recipe in options.recipes:
            add(model, recipe, "titan", ours)
            if recipe in TORCHAO:
                add(model, recipe, "compiled", torchao, True)
                add(model, recipe, "eager", torchao, False)
            if recipe in FIRST_TRACED and "problem" not in results[model, recipe, "titan"]:
                add(model, recipe, "trace", traced)
        for recipe in options.recipes:
            if recipe not in FIRST_TRACED and "problem" not in results[model, recipe, "titan"]:
                add(model, recipe, "trace", traced)


def cells(result: dict | None) -> list[str]:
    if not result:
        return ["", ""]
    if "problem" in result:
        return [result["problem"], ""]
    return [f"{result['tokens_per_s']:,.0f}", f"{result['memory']:.1f}"]


def ratio_of(one: dict, other: dict | None) -> str:
    if not other or "problem" in one or "problem" in other:
        return ""
    return f"{one['tokens_per_s'] / other['tokens_per_s']:.2f}"


def table(results: dict) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
    for model, recipe in ((model, recipe) for model, recipe, part in results if part == "titan"):
        titan, trace = results[model, recipe, "titan"], results.get((model, recipe, "trace"))
        # A form of a recipe, such as bf16:graphs, is compared with the recipe's own.
        to_compiled = ratio_of(titan, results.get((model, recipe.split(":")[0], "compiled")))
        tflops, mfu = (f"{titan[name]:.1f}{unit}" if name in titan else "" for name, unit in (("tflops", ""), ("mfu", " %")))
        casts = "" if not trace else trace["problem"] if "problem" in trace else f"{100 * trace['casts']:.1f} %"
        speed, memory = cells(titan)
        torchaos = [cell for part in ("eager", "compiled") for cell in cells(results.get((model, recipe, part)))]
        row = [model, f"`{recipe}`", speed, ratio_of(titan, results.get((model, "bf16", "titan"))), tflops, mfu, memory, casts, *torchaos, to_compiled]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def machine(device: str) -> str:
    if device == "cpu":
        return "a CPU, emulated"
    if "VIRTUAL_GPU_DEVICES" in os.environ:
        return "a virtual GPU, whose times mean nothing"
    return first_line_of(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="write benchmarks/results/NAME.md")
    parser.add_argument("--models", type=lambda text: text.split(","), default=["1b", "3b", "8b_8"])
    parser.add_argument("--recipes", type=lambda text: text.split(","), default=list(TORCHAO))
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="run a small model, without a GPU")
    options = parser.parse_args()
    options.device = "cpu" if options.quick and "VIRTUAL_GPU_DEVICES" not in os.environ else "cuda"
    if options.quick:
        graphs = ["bf16:graphs"] if options.device == "cuda" else []
        options.models, options.recipes, options.seq_len, options.steps, options.warmup = ["tiny"], [*RECIPES, "bf16:reference", "tensorwise:delayed", *graphs], 64, 2, 3
    recipes = [*RECIPES, "tensorwise:delayed", *(f"{recipe}:{form}" for recipe in RECIPES for form in FORMS)]
    for what, given, known in (("model", options.models, MODELS), ("recipe", options.recipes, recipes)):
        if unknown := [one for one in given if one not in known]:
            parser.error(f"unknown {what}: {', '.join(unknown)}; known are {', '.join(known)}")
    versions = run([PYTHON, "-c", "import torch, torchao; print(f'PyTorch {torch.__version__}, torchao {torchao.__version__}')"]).strip().splitlines()[-1]
    commit = first_line_of(["git", "rev-parse", "--short=12", "HEAD"])
    head = f"# Float8 compared with bf16 and torchao: {options.name or options.device}\n\n- commit {commit}, `scripts/float8_table.py {' '.join(sys.argv[1:])}`\n"
    head += f"- {machine(options.device)}; {versions}; batches of 1 × {options.seq_len} tokens; median of {options.steps} steps after {options.warmup} warm-up steps\n"
    head += "- both have FSDP on their one rank: PyTorch's casts and copies parameters and gradients there, LibTitan's doesn't\n"
    head += f"- aims on one H200: {AIMS}\n\n"
    results = {}

    def end(*_) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice
        print(head + table(results), flush=True)
        sys.exit("float8_table.py: ended by a signal; the table has what was measured until then")  # this also ends the program that runs

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    measure(options, results)
    print(head + table(results))
    if options.name:
        (REPOSITORY / f"benchmarks/results/{options.name}.md").write_text(head + table(results))


if __name__ == "__main__":
    main()
