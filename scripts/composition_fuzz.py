#!/usr/bin/env python3
"""Trains a tiny Llama on random layouts, and compares each run with the same model and batches on one rank.

    scripts/composition_fuzz.py [--count 2000] [--seed S] [--jobs N] [--titan PATH] [--json FILE]
    scripts/composition_fuzz.py --resumes           # save on one layout, resume on another, and on the first again
    scripts/composition_fuzz.py --virtual-gpus      # over NCCL on virtual GPUs, also with compile.enable; any fault that they find is a failure
    scripts/composition_fuzz.py --float8            # each recipe on each axis alone: prints the table of docs/numerics.md
    scripts/composition_fuzz.py --seed 1 --only 17  # repeat one layout

Without --seed every day has its own.

A layout combines up to 8 ranks of data (replicated, sharded), context, tensor and pipeline parallelism with everything else that must
not change a run: schedules and micro-batches, policies of FSDP, forms of tensor and context parallelism, activation checkpointing,
accumulation, implementations. Five of eight layouts use the 8 ranks for three axes. The comparison covers loss, gradient norm,
learning rate and tokens of every step, losses of validations, and the final parameters; the runs also compare the bits of all replicas after each step.

A layout that `titan train` refuses (exit code 2 before any rank starts) counts as refused. Everything else is a failure: another exit code,
a refusal by ranks, a run that doesn't end, a difference above the tolerance. Failures are printed with the commands that repeat them. The
exit code is 1 after a failure, if more than half of the layouts were refused, or if fewer than half of 100 or more compared ones have three
parallel axes. Needs only Python's standard library.
"""

import argparse
import array
import collections
import concurrent.futures
import json
import math
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
PARALLEL_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
# Steps in a run, and in each of the three parts of one that resumes. On GPUs, a process records its third step if compile.enable is on.
STEPS, PART_STEPS = 3, 2
GPU_STEPS, GPU_PART_STEPS = 5, 4
NUM_PROBLEMS = 100  # Models with batches in a seed. Each runs once on one rank, for all its layouts.

MODELS = (
    {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 264, "multiple_of": 16},
    {"dim": 32, "n_layers": 7, "n_heads": 8, "n_kv_heads": 8, "vocab_size": 264, "multiple_of": 16},
    # Sizes that 2, 4 and 8 don't divide.
    {"dim": 40, "n_layers": 3, "n_heads": 4, "n_kv_heads": 4, "vocab_size": 263, "multiple_of": 5},
    {"dim": 48, "n_layers": 2, "n_heads": 6, "n_kv_heads": 3, "vocab_size": 261, "multiple_of": 1},
    {"dim": 16, "n_layers": 14, "n_heads": 4, "n_kv_heads": 4, "vocab_size": 259, "multiple_of": 8},
)
# Sizes that MXFP8's blocks of 32 divide, also in two parts.
BLOCK_MODELS = (
    {"dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 264, "multiple_of": 64},
    {"dim": 64, "n_layers": 6, "n_heads": 4, "n_kv_heads": 4, "vocab_size": 263, "multiple_of": 64},
)
FLOAT8_PROBLEMS = range(1, 9)  # the models and batches of --float8
# The layouts of --float8. The pipeline has one micro-batch.
ALONE = {
    "dp_replicate 2": {"parallelism.data_parallel_replicate_degree": 2},
    "dp_shard 2": {"parallelism.data_parallel_shard_degree": 2},
    "cp 2": {"parallelism.context_parallel_degree": 2},
    "tp 2": {"parallelism.tensor_parallel_degree": 2},
    "pp 2": {"parallelism.pipeline_parallel_degree": 2, "parallelism.pipeline_parallel_schedule": "GPipe"},
    "accumulation 2": {},
}
DTYPES = {
    "float64": ("float64", "float64", "float64"),
    "float32": ("float32", "float32", "float32"),
    "bfloat16": ("float32", "bfloat16", "float32"),
    "bfloat16_state": ("bfloat16", "bfloat16", "float32"),
}
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "mxfp8_cublas", "mxfp8_cublas_rceil")
PRECISIONS = (*DTYPES, *RECIPES)
# Largest relative differences: of losses, of gradient norms, and of a final parameter, which is saved in float32 (bfloat16_state: bfloat16).
TOLERANCES = {
    "float64": (1e-12, 1e-11, 1e-6),
    "float32": (1e-5, 1e-4, 1e-4),
    "bfloat16": (1e-3, 5e-3, 5e-2),
    "bfloat16_state": (2e-3, 5e-2, 5e-2),
    "tensorwise": (1e-2, 1e-1, 2e-1),
    "tensorwise_delayed": (1e-2, 1e-1, 2e-1),
    "rowwise": (1e-3, 5e-3, 5e-2),
    "rowwise_with_gw_hp": (1e-3, 5e-3, 5e-2),
    "mxfp8_cublas": (2e-3, 2e-2, 1e-1),
    "mxfp8_cublas_rceil": (2e-3, 2e-2, 1e-1),
}


class Failure(Exception):
    pass


class Refusal(Exception):
    pass


def described(error):
    return str(error) if isinstance(error, (Failure, Refusal)) else f"{type(error).__name__}: {error}"


def draw_problem(seed, number, precisions=PRECISIONS):
    """Returns what a layout must not change: precision, and settings of model, loss, batches and optimizer."""
    rng = random.Random(f"{seed}/problem {number}")
    weights = {"float64": 60, "float32": 12, "bfloat16": 8, "bfloat16_state": 4}
    precision = rng.choices(precisions, [weights.get(name, 5) for name in precisions])[0]
    is_mx = precision.startswith("mxfp8")
    dtypes = DTYPES.get(precision, DTYPES["float32"])
    settings = {f"model.args.{name}": value for name, value in rng.choice(BLOCK_MODELS if precision in RECIPES else MODELS).items()}
    settings["model.args.tie_embeddings"] = rng.random() < 0.4
    settings |= dict(zip(("training.dtype", "training.mixed_precision_param", "training.mixed_precision_reduce"), dtypes))
    if is_mx:
        settings |= {"model.converters": "quantize.linear.mx", "quantize.linear.mx.recipe_name": precision, "quantize.linear.mx.emulate": True}
    elif precision in RECIPES:
        settings |= {"model.converters": "quantize.linear.float8", "quantize.linear.float8.recipe_name": precision.removesuffix("_delayed"),
                     "quantize.linear.float8.emulate": True}
        if precision == "tensorwise_delayed":
            kinds = rng.sample(("input", "weight", "grad_output"), rng.randint(1, 3))
            settings |= {f"quantize.linear.float8.scaling_type_{kind}": "delayed" for kind in kinds}
    loss = rng.choice(("cross_entropy", "cross_entropy", "z_loss", "label_smoothing"))
    settings["loss.name"] = loss
    settings |= {"z_loss": {"loss.args.z_weight": 1e-2}, "label_smoothing": {"loss.args.epsilon": 0.1}}.get(loss, {})
    settings["training.seq_len"] = rng.choice((24, 48, 48))
    settings["training.global_batch_size"] = rng.choice((6, 8, 8, 12, 16))
    settings["training.max_norm"] = rng.choice((0.3, 1.0, 100.0))
    settings["optimizer.name"] = rng.choice(("AdamW", "AdamW", "Adam"))
    settings["optimizer.lr"] = 1e-2 if precision == "float64" else 2e-3  # Rounding errors grow with the rate.
    settings["data.seed"] = rng.randrange(1000)
    if rng.random() < 0.3:
        settings |= {"validation.enable": True, "validation.dataset": "synthetic", "validation.freq": 2, "validation.steps": 2,
                     "validation.seq_len": settings["training.seq_len"], "validation.global_batch_size": settings["training.global_batch_size"]}
    if rng.random() < 0.3:
        settings["optimizer.param_groups"] = "norm|tok_embeddings: lr=3e-3"
    return precision, settings


def fits(problem, degrees):
    """Leaves out most of what is refused anyway."""
    pieces = 2 * degrees["cp"] * degrees["tp"] if degrees["cp"] > 1 else degrees["tp"]
    return problem["model.args.n_kv_heads"] % degrees["tp"] == 0 and problem["training.seq_len"] % pieces == 0 and degrees["pp"] <= problem["model.args.n_layers"]


def draw_fitting_degrees(rng, problem, dense):
    for _ in range(20):
        degrees = draw_degrees(rng, dense)
        if fits(problem, degrees) or rng.random() < 0.02:
            break
    return degrees


def draw_degrees(rng, dense):
    if dense:
        chosen = rng.sample(PARALLEL_AXES, 3)
        return {axis: 2 if axis in chosen else 1 for axis in PARALLEL_AXES}
    degrees = dict.fromkeys(PARALLEL_AXES, 1)
    for factor in rng.choice(((2,), (3,), (2, 2), (4,), (2, 3), (2, 2, 2), (2, 4), (8,))):
        degrees[rng.choice(PARALLEL_AXES)] *= factor
    return degrees


def draw_batches(rng, problem, degrees):
    """Rows of a batch, of which a step has one or several, and of a pipeline's micro-batch."""
    share = math.ceil(problem["training.global_batch_size"] / (degrees["dp_replicate"] * degrees["dp_shard"]))
    divisors = [rows for rows in range(1, share + 1) if share % rows == 0]
    rows = rng.choice(divisors if rng.random() < 0.9 else range(1, share + 1))
    settings = {"training.local_batch_size": rows}
    if "validation.enable" in problem:
        settings["validation.local_batch_size"] = rows
    if degrees["pp"] > 1:
        if rng.random() < 0.7:  # a pipeline wants many micro-batches
            settings["training.local_batch_size"] = rows = share
            settings |= {"validation.local_batch_size": rows} if "validation.enable" in problem else {}
        settings["parallelism.pipeline_parallel_microbatch_size"] = rng.choice([size for size in (1, 1, 1, 2) if rows % size == 0])
    return settings


def draw_tensor_form(rng):
    form = rng.choice(("", "", "without sequence", "without loss", "asynchronous", "asynchronous"))
    if form == "without sequence":
        return {"parallelism.enable_sequence_parallel": False}
    if form == "without loss":
        return {"parallelism.disable_loss_parallel": True}
    if form == "asynchronous":
        return {"parallelism.enable_async_tensor_parallel": True, "parallelism.async_tensor_parallel_transport": rng.choice(("auto", "send_receive"))}
    return {}


def draw_pipeline(rng, num_ranks, num_layers):
    # Other schedules have at least two stages per rank.
    schedules = (*SCHEDULES, *SCHEDULES[2:]) if 2 * num_ranks <= num_layers + 1 else ("GPipe", "1F1B")
    settings = {"parallelism.pipeline_parallel_schedule": rng.choice(schedules)}
    settings["parallelism.pipeline_parallel_split"] = rng.choice(("torchtitan", "torchtitan", "balanced"))
    settings["parallelism.pipeline_parallel_first_stage_less_layers"] = rng.choice((0, 1, 1))
    settings["parallelism.pipeline_parallel_last_stage_less_layers"] = rng.choice((0, 1, 1))
    if rng.random() < 0.1:
        settings["parallelism.pipeline_parallel_layers_per_stage"] = rng.randint(1, 3)
    return settings


def draw_checkpointing(rng, num_layers):
    mode = rng.choice(("none", "none", "full", "selective", "selective", "memory_budget"))
    settings = {"activation_checkpoint.mode": mode}
    if mode == "selective":
        settings["activation_checkpoint.selective_ac_option"] = rng.choice(("op", "1", str(min(2, num_layers))))
    if mode == "memory_budget":
        settings["activation_checkpoint.memory_budget"] = rng.choice((0.0, 0.3, 0.7, 1.0))
    if mode != "none":
        settings["activation_checkpoint.early_stop"] = rng.random() < 0.7
    return settings


def draw_layout(rng, problem, precision, dense):
    """Returns degrees, and settings that must not change the run."""
    degrees = draw_fitting_degrees(rng, problem, dense)
    names = {"dp_replicate": "data_parallel_replicate", "dp_shard": "data_parallel_shard", "cp": "context_parallel", "tp": "tensor_parallel",
             "pp": "pipeline_parallel"}
    settings = {f"parallelism.{names[axis]}_degree": degree for axis, degree in degrees.items()}
    settings |= draw_batches(rng, problem, degrees)
    if degrees["tp"] > 1:
        settings |= draw_tensor_form(rng)
    if degrees["cp"] > 1:
        settings["parallelism.context_parallel_load_balancer"] = rng.choice(("headtail", "headtail", "None"))
        rotate, attention = rng.choice((("allgather", "ring"), ("alltoall", "ring"), ("allgather", "allgather_kv")))
        settings |= {"parallelism.context_parallel_rotate_method": rotate, "parallelism.context_parallel_attention": attention}
    if degrees["pp"] > 1:
        settings |= draw_pipeline(rng, degrees["pp"], problem["model.args.n_layers"])
    sizes = ["2"] if degrees["dp_shard"] * degrees["cp"] % 2 == 0 else []
    policies = ("default", "never") if degrees["pp"] > 1 and rng.random() < 0.9 else ("default", "always", "never", *sizes)
    settings["parallelism.fsdp_reshard_after_forward"] = rng.choice(policies)
    settings["parallelism.fsdp_reduce_every_micro_batch"] = rng.random() < 0.5
    settings |= draw_checkpointing(rng, problem["model.args.n_layers"])
    settings["optimizer.implementation"] = rng.choice(("fused", "foreach", "for-loop"))
    settings["training.dataloader.num_workers"] = rng.choice((0, 2))
    settings["fault_tolerance.check_replicas_freq"] = 1
    settings["debug.check_collectives"] = rng.random() < 0.2
    if precision == "tensorwise" and rng.random() < 0.5:
        settings["quantize.linear.float8.enable_fsdp_float8_all_gather"] = True
        settings["quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"] = rng.random() < 0.5
    if precision.startswith("mxfp8"):
        settings["quantize.linear.mx.mxfp8_dim1_cast_kernel_choice"] = rng.choice(("triton", "torch"))
    if precision == "float32":
        settings["ops.cpu_matmul"] = rng.choice(("auto", "mkl", "onednn"))
    return degrees, settings


def draw_recording(rng):
    """Recorded steps, which need two other settings, or none."""
    return {"compile.enable": True, "optimizer.implementation": "fused", "debug.check_collectives": False} if rng.random() < 0.5 else {}


def draw_gpus(rng):
    """How virtual GPUs behave, as variables of the environment (docs/virtual_gpu.md)."""
    knobs = {"VIRTUAL_GPU_RACES": "fatal", "VIRTUAL_GPU_GRAPHS_READ_HOST": "0", "VIRTUAL_GPU_SEED": str(rng.randrange(1000))}
    if rng.random() < 0.7:
        knobs["VIRTUAL_GPU_NCCL"] = "strict"
    if rng.random() < 0.3:
        knobs["VIRTUAL_GPU_LAZY_LOADING"] = "1"
    if rng.random() < 0.3:
        knobs["VIRTUAL_GPU_QUEUE_LIMIT"] = rng.choice(("64", "1024"))
    if rng.random() < 0.3:
        knobs["VIRTUAL_GPU_DELAY_US"] = rng.choice(("50", "500"))
    return [f"{name}={value}" for name, value in knobs.items()]


def num_ranks(settings):
    return math.prod(value for key, value in settings.items() if key.startswith("parallelism.") and key.endswith("_degree"))


def axes_of(problem, layout, precision):
    degrees = {axis: layout[f"parallelism.{name}_degree"] for axis, name in
               zip(PARALLEL_AXES, ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel"))}
    axes = [axis for axis, degree in degrees.items() if degree > 1]
    rows = layout["training.local_batch_size"] * degrees["dp_replicate"] * degrees["dp_shard"]
    others = {"ac": layout["activation_checkpoint.mode"] != "none", "float8": precision in RECIPES, "tied": problem["model.args.tie_embeddings"],
              "accumulation": problem["training.global_batch_size"] > rows}
    return axes + [name for name, is_on in others.items() if is_on]


class Program:
    """Runs `titan train` on the CPU or on virtual GPUs."""

    def __init__(self, titan, limit_s, folder, virtual_gpus):
        self.titan, self.limit_s, self.folder, self.virtual_gpus = titan, limit_s, folder, virtual_gpus
        self.steps, self.part_steps = (GPU_STEPS, GPU_PART_STEPS) if virtual_gpus else (STEPS, PART_STEPS)

    def command(self, settings, name, knobs=()):
        ranks = num_ranks(settings)
        words = ["env", *knobs, str(REPOSITORY / "scripts/virtual_gpus.sh"), str(ranks), "--"] if self.virtual_gpus else []
        words += [str(self.titan), "train"] + (["--nproc", str(ranks)] if ranks > 1 else [])
        always = {"job.dump_folder": self.folder / name, "model.hf_assets_path": "bytes", "training.dataset": "synthetic",
                  "training.device": "cuda" if self.virtual_gpus else "cpu",
                  "data.synthetic_documents": 64, "metrics.log_freq": 1, "metrics.structured_logs.enable": False,
                  "optimizer.eps": 1e-4, "lr_scheduler.warmup_steps": 2, "lr_scheduler.total_steps": 3 * self.part_steps, "checkpoint.enable": True}
        text = {True: "true", False: "false"}
        return words + [f"--{key}={text.get(value, value) if isinstance(value, bool) else value}" for key, value in (always | settings).items()]

    def run(self, settings, name, knobs=()):
        """Returns nothing. Throws Refusal or Failure."""
        environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
        process = subprocess.Popen(self.command(settings, name, knobs), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                   env=environment, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            raise Failure(f"hangs: it has not ended after {self.limit_s} s\n{self.stop(process)}")
        if process.returncode == 0:
            return
        last = "\n".join(output.splitlines()[-20:])
        if process.returncode != 2:
            raise Failure(f"exit code {process.returncode}\n{last}")
        if "[rank " in output:
            raise Failure(f"refused only after ranks had started\n{last}")
        raise Refusal(output.strip().splitlines()[-1].strip().removeprefix("titan: "))

    @staticmethod
    def stop(process):
        # The launcher asks its ranks to end; the ranks of a killed launcher end with it.
        for number, wait_s in ((signal.SIGQUIT, 3), (signal.SIGTERM, 10), (signal.SIGKILL, 30)):
            try:
                process.send_signal(number)
                return process.communicate(timeout=wait_s)[0][-4000:]
            except subprocess.TimeoutExpired:
                continue
        return "(and it can't be killed)"

    def results(self, name, last_step):
        """The logged numbers by step, the losses of validations, and the parameters after the last step."""
        folder = self.folder / name
        rows = {kind: [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()] if (folder / f"{kind}.jsonl").exists() else []
                for kind in ("metrics", "validation")}
        return {**rows, "parameters": read_safetensors(folder / "checkpoint" / f"step-{last_step}" / "model.safetensors")}


def read_safetensors(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    return {name: data[8 + size + entry["data_offsets"][0]:8 + size + entry["data_offsets"][1]] for name, entry in header.items()}


def relative(found, expected):
    """Infinity if one of them isn't finite: the metrics hold null then."""
    if found is None or expected is None:
        return math.inf
    if found == expected:
        return 0.0
    difference = abs(found - expected) / max(abs(expected), 1e-300)
    return difference if math.isfinite(difference) else math.inf


def relative_norm(found, expected):
    """||found - expected|| / ||expected|| of two tensors of float32."""
    if found == expected:
        return 0.0
    a, b = array.array("f", found), array.array("f", expected)
    if len(a) != len(b):
        return math.inf
    difference = math.dist(a, b) / max(math.hypot(*b), 1e-30)
    return difference if math.isfinite(difference) else math.inf


def compare(found, expected):
    """The largest relative differences, {"loss": .., "norm": .., "parameter": ..}. Throws Failure if rows or parameters are missing."""
    for kind in ("metrics", "validation"):
        steps = [[row["step"] for row in run[kind]] for run in (found, expected)]
        if steps[0] != steps[1]:
            raise Failure(f"{kind}.jsonl has steps {steps[0]}, one rank's has {steps[1]}")
    for row, wanted in zip(found["metrics"], expected["metrics"]):
        for key in ("lr", "n_tokens_seen"):
            if row[key] != wanted[key]:
                raise Failure(f"step {row['step']}: {key} is {row[key]}, one rank's is {wanted[key]}")
    if found["parameters"].keys() != expected["parameters"].keys():
        raise Failure(f"other parameters: {sorted(found['parameters'].keys() ^ expected['parameters'].keys())}")
    pairs = list(zip(found["metrics"], expected["metrics"]))
    losses = [relative(row["loss"], wanted["loss"]) for row, wanted in pairs + list(zip(found["validation"], expected["validation"]))]
    norms = [relative(row["grad_norm"], wanted["grad_norm"]) for row, wanted in pairs]
    parameters = [relative_norm(tensor, expected["parameters"][name]) for name, tensor in found["parameters"].items()]
    return {"loss": max(losses), "norm": max(norms), "parameter": max(parameters), "first_loss": losses[0], "first_norm": norms[0]}


class References:
    """One run on one rank for each problem, made when it is first needed."""

    def __init__(self, program, steps):
        self.program, self.steps = program, steps
        self.lock, self.runs = threading.Lock(), {}

    def get(self, name, problem):
        with self.lock:
            is_new = name not in self.runs
            run = self.runs.setdefault(name, concurrent.futures.Future())
        if is_new:
            try:
                self.program.run(self.settings(problem), name)
                run.set_result(self.program.results(name, self.steps))
            except Exception as error:  # Other threads wait for the result, whatever went wrong.
                run.set_exception(Failure(f"the run on one rank failed: {described(error)}"))
        return run.result()

    def settings(self, problem):
        rows = problem["training.global_batch_size"]
        settings = problem | {"training.local_batch_size": rows, "training.steps": self.steps}
        return settings | ({"validation.local_batch_size": rows} if "validation.enable" in problem else {})


class Case:
    """One drawn layout, or two of them: the run changes from one to the other and back."""

    def __init__(self, program, seed, number, resumes):
        rng = random.Random(f"{seed}/{'resume' if resumes else 'layout'} {number}")
        self.number = number
        self.problem_name = f"problem_{rng.randrange(NUM_PROBLEMS)}"
        self.precision, self.problem = draw_problem(seed, self.problem_name, ("float64",) if resumes else PRECISIONS)
        self.layouts = [draw_layout(rng, self.problem, self.precision, number % 8 not in (0, 4, 6))[1] for _ in range(2 if resumes else 1)]
        if resumes:
            for layout in self.layouts:
                layout["checkpoint.async_mode"] = rng.choice(("disabled", "async", "async_with_pinned_mem"))
        self.axes = [axes_of(self.problem, layout, self.precision) for layout in self.layouts]
        self.last_step = 3 * program.part_steps if resumes else program.steps
        self.knobs = []
        if program.virtual_gpus:
            rng = random.Random(f"{seed}/virtual GPUs {number}")
            self.knobs = draw_gpus(rng)
            for layout in self.layouts:
                layout |= draw_recording(rng)

    def parts(self):
        """Settings of the runs, one after the other in one folder."""
        if len(self.layouts) == 1:
            return [self.problem | self.layouts[0] | {"training.steps": self.last_step}]
        first, second = self.layouts
        saves = {"checkpoint.last_save_model_only": False}
        steps = self.last_step // 3
        return [self.problem | first | {"training.steps": steps} | saves, self.problem | second | {"training.steps": 2 * steps} | saves,
                self.problem | first | {"training.steps": 3 * steps}]

    def schedules(self):
        return [layout.get("parallelism.pipeline_parallel_schedule", "no pipeline") for layout in self.layouts]

    def run(self, program, references):
        """Returns the outcome as a dictionary for the report."""
        name = f"layout_{self.number}"
        commands = [program.command(part, name, self.knobs) for part in self.parts()] + [program.command(references.settings(self.problem), self.problem_name)]
        outcome = {"number": self.number, "precision": self.precision, "axes": self.axes, "schedules": self.schedules(),
                   "commands": [shlex.join(command) for command in commands]}
        try:
            expected = references.get(self.problem_name, self.problem)
            for part in self.parts():
                program.run(part, name, self.knobs)
            outcome["differences"] = differences = compare(program.results(name, self.last_step), expected)
            found = [differences[kind] for kind in ("loss", "norm", "parameter")]
            if any(value > most for value, most in zip(found, TOLERANCES[self.precision])):
                raise Failure("differs from one rank: loss {:.1e}, norm {:.1e}, parameter {:.1e}; allowed: {:.0e}, {:.0e}, {:.0e}".format(
                    *found, *TOLERANCES[self.precision]))
        except Refusal as refusal:
            outcome["refused"] = str(refusal)
        except Exception as error:  # Damaged files of a run are its failure too.
            outcome["failed"] = described(error)
        shutil.rmtree(program.folder / name, ignore_errors=True)
        return outcome


def float8_difference(program, references, recipe, axis, number):
    """The first step's loss and gradient norm on `axis`, compared with one rank."""
    _, problem = draw_problem("float8", number, (recipe,))
    problem = {key: value for key, value in problem.items() if not key.startswith("validation.")} | {"training.global_batch_size": 8, "training.seq_len": 48}
    rows = 8 if axis in ("cp 2", "tp 2", "pp 2") else 4
    layout = {"parallelism.data_parallel_shard_degree": 1} | ALONE[axis] | {"training.local_batch_size": rows}
    layout |= {"parallelism.pipeline_parallel_microbatch_size": rows} if axis == "pp 2" else {}
    name = f"{recipe} {axis} {number}"
    program.run(problem | layout | {"training.steps": STEPS}, name)
    differences = compare(program.results(name, STEPS), references.get(f"{recipe} {number}", problem))
    return max(differences["first_loss"], differences["first_norm"])


def float8_table(arguments, program):
    references = References(program, STEPS)
    names = [(recipe, axis, number) for recipe in RECIPES for axis in ALONE for number in FLOAT8_PROBLEMS]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        found = dict(zip(names, pool.map(lambda name: float8_difference(program, references, *name), names)))
    print("| recipe | " + " | ".join(ALONE) + " |\n" + "| --- " * (len(ALONE) + 1) + "|")
    for recipe in RECIPES:
        worst = [max(found[recipe, axis, number] for number in FLOAT8_PROBLEMS) for axis in ALONE]
        print(f"| `{recipe}` | " + " | ".join(f"{value:.1e}" if value else "0" for value in worst) + " |")
    return 0


def reason_of(refusal):
    """A refusal without its values, to count equal ones together."""
    return re.sub(r"\d+(\.\d+)?", "N", refusal)[:160]


class Report:
    def __init__(self, count, again):
        self.count, self.again, self.outcomes = count, again, []
        self.start = self.shown = time.monotonic()

    def add(self, outcome):
        self.outcomes.append(outcome)
        if "failed" in outcome:
            print(f"\nFAILED: layout {outcome['number']} ({outcome['precision']}; {outcome['axes']}): {outcome['failed']}", flush=True)
            print(f"  repeat it with {self.again} --only {outcome['number']}; its commands, the last one on one rank:\n    "
                  + "\n    ".join(outcome["commands"]), flush=True)
        elif self.count == 1:
            print(json.dumps(outcome, indent=1))
        if time.monotonic() - self.shown > 15:
            self.shown = time.monotonic()
            print(f"{len(self.outcomes)} of {self.count}: {len(self.of('differences'))} compared, {len(self.of('refused'))} refused, "
                  f"{len(self.of('failed'))} failed, {self.shown - self.start:.0f} s", flush=True)

    def of(self, kind):
        return [outcome for outcome in self.outcomes if kind in outcome]

    def summary(self):
        compared = self.of("differences")
        by_axes = collections.Counter(len(axes) for outcome in compared for axes in outcome["axes"])
        parallel = collections.Counter(sum(axis in PARALLEL_AXES for axis in axes) for outcome in compared for axes in outcome["axes"])
        worst = {}
        for precision in PRECISIONS:
            some = [outcome for outcome in compared if outcome["precision"] == precision]
            if some:
                worst[precision] = {"layouts": len(some), **{kind: max(outcome["differences"][kind] for outcome in some) for kind in ("loss", "norm", "parameter")}}
        return {
            "layouts": len(self.outcomes),
            "not_drawn": self.count - len(self.outcomes),
            "compared": len(compared),
            "refused": dict(collections.Counter(reason_of(outcome["refused"]) for outcome in self.of("refused")).most_common()),
            "failed": self.of("failed"),
            "by_number_of_axes": dict(sorted(by_axes.items())),
            "by_number_of_parallel_axes": dict(sorted(parallel.items())),
            "share_with_three_parallel_axes": sum(number for axes, number in parallel.items() if axes >= 3) / max(1, sum(parallel.values())),
            "by_schedule": dict(collections.Counter(schedule for outcome in compared for schedule in outcome["schedules"]).most_common()),
            "worst": worst,
            "seconds": round(time.monotonic() - self.start, 1),
        }


def print_summary(summary):
    refused = sum(summary["refused"].values())
    print(f"\nseed {summary['seed']}, {summary['layouts']} layouts: {summary['compared']} compared, {refused} refused, {len(summary['failed'])} failed, {summary['seconds']:.0f} s")
    if summary["not_drawn"]:
        print(f"cut short by --minutes: {summary['not_drawn']} more layouts were not drawn")
    print(f"three or more parallel axes: {summary['share_with_three_parallel_axes']:.0%} of the compared layouts")
    for title, key in (("axes at once", "by_number_of_axes"), ("parallel axes at once", "by_number_of_parallel_axes"), ("schedule", "by_schedule")):
        print(f"by {title}: " + ", ".join(f"{name}: {number}" for name, number in summary[key].items()))
    print("refused:" if refused else "none refused")
    for reason, number in summary["refused"].items():
        print(f"  {number:4} {reason}")
    print("\n| precision | compared | loss | gradient norm | parameter | tolerances |\n| --- | --- | --- | --- | --- | --- |")
    for precision, worst in summary["worst"].items():
        print("| {} | {layouts} | {loss:.1e} | {norm:.1e} | {parameter:.1e} | {} |".format(
            precision, ", ".join(f"{most:.0e}" for most in TOLERANCES[precision]), **worst))


def is_failed(summary):
    few_axes = summary["compared"] >= 100 and summary["share_with_three_parallel_axes"] < 0.5
    return bool(summary["failed"]) or few_axes or 2 * summary["compared"] < max(1, summary["layouts"])


def fuzz(arguments, program):
    numbers = [arguments.only] if arguments.only is not None else range(1, arguments.count + 1)
    references = References(program, 3 * program.part_steps if arguments.resumes else program.steps)
    modes = "".join(f" --{name}" for name, is_on in (("resumes", arguments.resumes), ("virtual-gpus", arguments.virtual_gpus)) if is_on)
    report = Report(len(numbers), f"--seed {arguments.seed}{modes}")
    deadline = time.monotonic() + 60 * arguments.minutes

    def run(number):
        return Case(program, arguments.seed, number, arguments.resumes).run(program, references) if time.monotonic() < deadline else None

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for done in concurrent.futures.as_completed([pool.submit(run, number) for number in numbers]):
            if done.result():
                report.add(done.result())
    summary = {"seed": arguments.seed, "resumes": arguments.resumes, **report.summary()}
    print_summary(summary)
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if is_failed(summary) else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="layouts to draw (default 2000)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no layout after this time")
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d", time.gmtime())), help="default: today's date")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (default: the number of processors)")
    parser.add_argument("--titan", type=pathlib.Path, default=REPOSITORY / "build/bin/titan")
    parser.add_argument("--only", type=int, metavar="K", help="run only layout K of the seed")
    parser.add_argument("--resumes", action="store_true", help="save on one layout, resume on another, and on the first again")
    parser.add_argument("--virtual-gpus", action="store_true", help="run layouts and references on virtual GPUs (docs/virtual_gpu.md)")
    parser.add_argument("--float8", action="store_true", help="measure each Float8 recipe on each axis alone")
    parser.add_argument("--limit", type=float, default=1800, metavar="S", help="seconds after which a run counts as hanging (default 1800; ranks that hang end themselves earlier)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the counts and failures to FILE")
    arguments = parser.parse_args()
    if not os.access(arguments.titan, os.X_OK):
        parser.error(f"{arguments.titan} is no program: build it with scripts/build.sh titan, or name it with --titan")
    with tempfile.TemporaryDirectory(prefix="composition_fuzz.") as folder:
        run = float8_table if arguments.float8 else fuzz
        sys.exit(run(arguments, Program(arguments.titan.absolute(), arguments.limit, pathlib.Path(folder), arguments.virtual_gpus)))


if __name__ == "__main__":
    main()
