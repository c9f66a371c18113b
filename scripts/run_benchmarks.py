#!/usr/bin/env python3
"""Compares LibTitan's training with the same model in PyTorch, in alternating runs, and prints a table.

    scripts/run_benchmarks.py [--quick] [--name NAME] [--rows debug_fp32_1,134m_bf16_2,host_fp32]

Rows of training are MODEL_DTYPE_RANKS, with the configs in benchmarks/configs. RANKS is
  1, 2              ranks of FSDP, compared with PyTorch's FSDP2
  tp2               tensor parallelism, compared with PyTorch's
  atp2              asynchronous tensor parallelism, compared with PyTorch's plain form
  cp2               context parallelism, compared with PyTorch's FSDP2 (PyTorch has no context parallelism on CPUs)
  SCHEDULE2         a pipeline with that schedule, compared with torch.distributed.pipelining with the same one
Other rows that are compared with PyTorch:
  host_DTYPE        host time per transformer block with tiny shapes; host_fp32_tp2: under tensor parallelism; host_bf16_cuda: on a
                    virtual GPU, without that one's own work
  checkpoint        saves and loads, compared with torch.distributed.checkpoint
Single parts:
  tokenizer         compared with the `tokenizers` package
  loader, init, optim
  attention         a ring's blocks, compared with the whole
  activation_checkpoint      memory and time of each policy
  float8_snr        gradients of each recipe, compared with fp32's
  flight_record     the cost of recording a call; above a microsecond it is an error
  float8, float8_fp32        casts, compared with LibTorch's
  overlap           a tensor-parallel rank's products in parts and joined, compared with plain ones; overlap_whole: on a single rank
  pipeline_host     host time of a schedule's actions
  bubble_SCHEDULE   a pipeline's bubble, compared with the simulator's
  rank_file, rank_file_2     a checkpoint's file, compared with the disk's own speed, with one and two processes

Prints a JSON object per row and the tables at the end. --name also writes the tables to benchmarks/results/NAME.md; benchmarks/README.md
says how to publish them. Every figure is the median over the runs. Both sides use cores / ranks threads per rank. Needs build/bin/titan,
the *_bench programs (scripts/build.sh benchmarks) and .venv; the script itself uses only Python's standard library.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import tomllib

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = REPOSITORY / "benchmarks/configs"
RESULTS = REPOSITORY / "benchmarks/results"
PYTHON = REPOSITORY / ".venv/bin/python"
TITAN = REPOSITORY / "build/bin/titan"
HOST_TIME = REPOSITORY / "build/bin/host_time_bench"
DTYPES = ("fp32", "bf16")
PROGRAMS = REPOSITORY / "build/bin"
TOKENIZER = REPOSITORY / "assets/tokenizer"
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
PIPELINE = [TITAN, "launch", "-n", "2", "--", PROGRAMS / "pipeline_bench", "--schedule"]
CHECKPOINTS = "/var/tmp"  # on a disk; /tmp may be in memory
PARTS = {
    "tokenizer": [PYTHON, "scripts/compare_tokenizers.py", "--bench", PROGRAMS / "tokenizer_bench", "--runs", "5"],
    "loader": [PROGRAMS / "loader_bench", "synthetic", "", TOKENIZER],
    "init": [PROGRAMS / "init_bench"],
    "optim": [PROGRAMS / "optim_bench"],
    "attention": [PROGRAMS / "attention_bench"],
    "activation_checkpoint": [PROGRAMS / "activation_checkpoint_bench"],
    "float8_snr": [PROGRAMS / "float8_snr_bench"],
    "flight_record": [PROGRAMS / "flight_record_bench", "--most", "1000"],  # more nanoseconds are an error
    "float8": [PROGRAMS / "float8_bench"],
    "float8_fp32": [PROGRAMS / "float8_bench", "--dtype", "float32"],
    "overlap": [PROGRAMS / "overlap_bench"],
    "overlap_whole": [PROGRAMS / "overlap_bench", "--tp", "1"],
    "pipeline_host": [PROGRAMS / "pipeline_bench", "--host-time", "1"],
    "rank_file": [PROGRAMS / "rank_file_bench", "--folder", CHECKPOINTS],
    "rank_file_2": [PROGRAMS / "rank_file_bench", "--folder", CHECKPOINTS, "--processes", "2"],
}
PARTS |= {f"bubble_{schedule}": [*PIPELINE, schedule] for schedule in SCHEDULES}
TRAINING = [f"{m}_{d}_{r}" for m in ("debug", "134m") for d in DTYPES for r in (1, 2)]
TRAINING += [f"{m}_fp32_{kind}2" for m in ("debug", "134m") for kind in ("tp", "atp", "cp")]
TRAINING += [f"134m_fp32_{schedule}2" for schedule in SCHEDULES]
ROWS = TRAINING + [f"host_{d}" for d in DTYPES] + ["host_fp32_tp2", "host_bf16_cuda", "checkpoint"] + list(PARTS)
MIB_PER_KIB = 1 / 1024
RUN_LIMIT_S = 3600


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much to run. Sizes that are None are taken from the row's config."""

    runs: int = 5
    warmup: int = 2
    steps: int = 5
    local_batch_size: int | None = None
    seq_len: int | None = None
    repetitions: int = 200


QUICK = Plan(runs=1, warmup=1, steps=2, local_batch_size=1, seq_len=128, repetitions=20)


@dataclasses.dataclass(frozen=True)
class Output:
    text: str
    peak_rss_mib: float  # peak of the largest process among the command and its descendants


class CommandFailed(Exception):
    pass


def run(command: list, threads: int) -> Output:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen([str(part) for part in command], stdout=stdout, stderr=stderr, env=environment, cwd=REPOSITORY)
        limit = threading.Timer(RUN_LIMIT_S, process.kill)  # ranks end with the process that started them
        limit.start()
        _, status, usage = os.wait4(process.pid, 0)  # wait4 reaps the process: only its caller learns the peak memory
        limit.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        stdout.seek(0)
        stderr.seek(0)
        if process.returncode != 0:
            tail = (stdout.read() + stderr.read()).decode(errors="replace")[-2000:]
            raise CommandFailed(f"{shlex.join(map(str, command))} ended with {process.returncode}:\n{tail}")
        return Output(stdout.read().decode(), usage.ru_maxrss * MIB_PER_KIB)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def last_json(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


@dataclasses.dataclass(frozen=True)
class TrainingRow:
    model: str
    dtype: str
    kind: str  # kind of parallelism: "" (FSDP), "tp", "atp", "cp", or a pipeline schedule
    ranks: int
    plan: Plan
    local_batch_size: int
    seq_len: int

    @staticmethod
    def parse(name: str, plan: Plan) -> "TrainingRow":
        model, dtype, ranks = name.split("_")
        training = tomllib.loads((CONFIGS / f"{model}.toml").read_text())["training"]
        batch = plan.local_batch_size or training["local_batch_size"]
        kind = ranks[:-1]
        return TrainingRow(model, dtype, kind, int(ranks.removeprefix(kind)), plan, batch, plan.seq_len or training["seq_len"])

    @property
    def threads(self) -> int:
        return max(1, cores() // self.ranks)

    def figures(self, step_s: list[float], startup_s: float, peak_rss_mib: float, batches: int) -> dict[str, float]:
        tokens = batches * self.local_batch_size * self.seq_len
        return {"tokens_per_s": tokens / statistics.median(step_s), "startup_s": startup_s, "peak_rss_mib": peak_rss_mib}

    def ours(self) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            command = [TITAN, "train", CONFIGS / f"{self.model}_{self.dtype}.toml", "--nproc", self.ranks]
            command += ["--job.dump_folder", folder, "--training.steps", self.plan.warmup + self.plan.steps]
            command += ["--training.local_batch_size", self.local_batch_size, "--training.seq_len", self.seq_len]
            pipeline = ["--parallelism.pipeline_parallel_degree", self.ranks, "--parallelism.pipeline_parallel_schedule", self.kind]
            command += {
                "": [],
                "tp": ["--parallelism.tensor_parallel_degree", self.ranks],
                "atp": ["--parallelism.tensor_parallel_degree", self.ranks, "--parallelism.enable_async_tensor_parallel"],
                "cp": ["--parallelism.context_parallel_degree", self.ranks],
            }.get(self.kind, pipeline)
            output = run(command, self.threads)
            steps = [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()]
        step_s = [step["step_s"] for step in steps[self.plan.warmup :]]
        return self.figures(step_s, steps[0]["startup_s"], output.peak_rss_mib, 1 if self.kind else self.ranks)

    def pytorch(self) -> dict[str, float]:
        command = [PYTHON, "benchmarks/pytorch/train_bench.py", "--model", self.model, "--dtype", self.dtype, "--ranks", self.ranks]
        command += ["--steps", self.plan.steps, "--warmup", self.plan.warmup]
        command += ["--local-batch-size", self.local_batch_size, "--seq-len", self.seq_len]
        tensor_parallel = self.kind in ("tp", "atp")
        command += ["--tp"] if tensor_parallel else []
        pipeline_parallel = self.kind in SCHEDULES
        command += ["--pp", self.kind, "--micro-batches", self.local_batch_size] if pipeline_parallel else []
        output = run(command, self.threads)
        result = last_json(output.text)
        batches = 1 if tensor_parallel or pipeline_parallel else self.ranks
        return self.figures(result["step_s"], result["startup_s"], output.peak_rss_mib, batches)


@dataclasses.dataclass(frozen=True)
class HostTimeRow:
    dtype: str
    form: str  # "tp2", "cuda" or ""
    plan: Plan

    @staticmethod
    def parse(name: str, plan: Plan) -> "HostTimeRow":
        _, dtype, *form = name.split("_")
        return HostTimeRow(dtype, form[0] if form else "", plan)

    def measure(self, program: list) -> dict[str, float]:
        command = [*program, "--dtype", self.dtype, "--repetitions", self.plan.repetitions]
        if self.form == "cuda":
            command = ["env", "VIRTUAL_GPU_POISON=0", "VIRTUAL_GPU_RACES=0", "VIRTUAL_GPU_MEMORY_ONLY=1", "scripts/virtual_gpus.sh", "1", "--", *command, "--device", "cuda"]
        elif self.form:
            command += ["--tp", self.form.removeprefix("tp")]
        return last_json(run(command, 1).text)

    def ours(self) -> dict[str, float]:
        return self.measure([HOST_TIME])

    def pytorch(self) -> dict[str, float]:
        return self.measure([PYTHON, "benchmarks/pytorch/host_time.py"])


@dataclasses.dataclass(frozen=True)
class CheckpointRow:
    plan: Plan

    @property
    def arguments(self) -> list:
        return ["--runs", 1 if self.plan.runs == 1 else 3]

    def ours(self) -> dict[str, float]:
        command = [TITAN, "launch", "-n", "2", "--", PROGRAMS / "checkpoint_bench", "--folder", CHECKPOINTS]
        text = run([*command, *self.arguments], 1).text
        return json.loads(text[text.rindex("{") :])

    def pytorch(self) -> dict[str, float]:
        command = [PYTHON, "benchmarks/pytorch/dcp_bench.py", "--checkpoints", CHECKPOINTS]
        return last_json(run([*command, *self.arguments], 1).text)


def parse_row(name: str, plan: Plan) -> TrainingRow | HostTimeRow | CheckpointRow:
    if name == "checkpoint":
        return CheckpointRow(plan)
    return HostTimeRow.parse(name, plan) if name.startswith("host_") else TrainingRow.parse(name, plan)


def flattened(value: dict, prefix: str = "") -> dict[str, str]:
    """Nested objects and lists as one level: {"results": [{"ours": 3}]} becomes {"results 1 ours": "3"}."""
    result = {}
    for key, item in value.items():
        if isinstance(item, list):
            item = {str(index + 1): element for index, element in enumerate(item)}
        if isinstance(item, dict):
            result |= flattened(item, f"{prefix}{key} ")
        else:
            result[prefix + key] = f"{item:.4g}" if isinstance(item, float) else str(item)
    return result


def median_text(texts: list[str]) -> str:
    """The median of printed numbers. Other texts are the same in all runs."""
    try:
        return f"{statistics.median(map(float, texts)):.4g}"
    except ValueError:
        return texts[0]


def objects(text: str) -> dict:
    """The JSON object that a program printed. Several objects become one, keyed by the first string in each."""
    found, at = [], text.find("{")
    while at >= 0:
        item, end = json.JSONDecoder().raw_decode(text, at)
        found.append(item)
        at = text.find("{", end)
    if len(found) == 1:
        return found[0]
    return {next(value for value in item.values() if isinstance(value, str)): item for item in found}


def measure_part(name: str, plan: Plan) -> dict:
    texts = [run(PARTS[name], cores()).text for _ in range(plan.runs)]
    runs = [flattened(objects(text)) for text in texts]
    return {"row": name, "part": {figure: median_text([result[figure] for result in runs]) for figure in runs[0]}}


def measure(name: str, plan: Plan) -> dict:
    """Both sides' medians, and for each figure the ratio of LibTitan's value to PyTorch's."""
    if name in PARTS:
        return measure_part(name, plan)
    row = parse_row(name, plan)
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "pytorch": []}
    pytorch_error = None
    for index in range(plan.runs):
        for side in ("ours", "pytorch") if index % 2 == 0 else ("pytorch", "ours"):
            if side == "pytorch" and pytorch_error:
                continue
            try:
                runs[side].append(getattr(row, side)())
            except CommandFailed as error:
                if side == "ours" or not isinstance(row, TrainingRow) or row.kind not in SCHEDULES:
                    raise
                pytorch_error = str(error)  # some of PyTorch's schedules don't run over gloo
    median = {
        side: {figure: statistics.median(result[figure] for result in results) for figure in results[0]} if results else None
        for side, results in runs.items()
    }
    if pytorch_error:
        return {"row": name} | median | {"pytorch_error": pytorch_error, "runs": runs}
    both = median["ours"].keys() & median["pytorch"].keys()
    comparable = [figure for figure in median["ours"] if figure in both and median["pytorch"][figure] != 0]  # extra memory can be 0
    ratio = {figure: median["ours"][figure] / median["pytorch"][figure] for figure in comparable}
    return {"row": name} | median | {"ratio": ratio, "runs": runs}


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [" | ".join(["", *cells, ""]).strip() for cells in (header, ["---"] * len(header), *rows)]


def spread(result: dict, side: str, figure: str) -> str:
    values = [each[figure] for each in result["runs"][side]]
    return f"{min(values):,.0f}–{max(values):,.0f}"


def training_table(results: list[dict]) -> list[str]:
    header = ["model", "dtype", "ranks", "tokens/s", "(min–max)", "PyTorch", "(min–max)", "ratio"]
    header += ["start-up s", "PyTorch", "ratio", "peak RSS MiB", "PyTorch", "ratio"]
    rows = []
    for result in results:
        cells = result["row"].split("_")
        ours, pytorch, ratio = result["ours"], result["pytorch"], result.get("ratio")
        cells += [f"{ours['tokens_per_s']:,.0f}", spread(result, "ours", "tokens_per_s")]
        if "pytorch_error" in result:
            cells += ["fails", "", "", f"{ours['startup_s']:.2f}", "", "", f"{ours['peak_rss_mib']:,.0f}", "", ""]
            rows.append(cells)
            continue
        cells += [f"{pytorch['tokens_per_s']:,.0f}", spread(result, "pytorch", "tokens_per_s"), f"{ratio['tokens_per_s']:.2f}"]
        cells += [f"{ours['startup_s']:.2f}", f"{pytorch['startup_s']:.2f}", f"{ratio['startup_s']:.2f}"]
        cells += [f"{ours['peak_rss_mib']:,.0f}", f"{pytorch['peak_rss_mib']:,.0f}", f"{ratio['peak_rss_mib']:.2f}"]
        rows.append(cells)
    return table(header, rows)


def host_table(results: list[dict]) -> list[str]:
    figure = "us_per_block"
    rows = [
        [result["row"].removeprefix("host_"), *(f"{result[side][figure]:,.0f}" for side in ("ours", "pytorch"))]
        + [f"{result['ratio'][figure]:.2f}"]
        for result in results
    ]
    return table(["dtype", "µs per block", "PyTorch", "ratio"], rows)


def checkpoint_table(result: dict) -> list[str]:
    def cell(side: str, figure: str) -> str:
        return f"{result[side][figure]:.3g}" if figure in result[side] else ""

    figures = sorted(result["ours"].keys() | result["pytorch"].keys())
    return table(
        ["figure", "ours", "torch.distributed.checkpoint", "ratio"],
        [[figure, *(cell(side, figure) for side in ("ours", "pytorch", "ratio"))] for figure in figures],
    )


def processor() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()]
    model = f"{fields.get('model name', 'unknown')}, family {fields.get('cpu family', '?')} model {fields.get('model', '?')}"
    return f"{model}, {cores()} cores ({', '.join(wide)})"


def commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short=12", "HEAD") + (" with uncommitted changes" if changed else "")


def environment(plan: Plan) -> list[str]:
    version = subprocess.run([PYTHON, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True).stdout.strip()
    arguments = shlex.join(["scripts/run_benchmarks.py", *sys.argv[1:]])
    return [
        f"- commit {commit()}, `{arguments}`",
        f"- {processor()}; load average at the start {os.getloadavg()[0]:.1f}; PyTorch {version}",
        f"- medians of {plan.runs} runs, alternating where two sides are compared; a training run is represented by the median of {plan.steps} steps after "
        f"{plan.warmup} warm-up steps, a part by its program's own figures",
    ]


def parts_table(results: list[dict]) -> list[str]:
    return table(["part", "figure", "value"], [[r["row"], key, value] for r in results for key, value in r["part"].items()])


def report(name: str, facts: list[str], results: list[dict]) -> str:
    lines = [f"# Benchmarks: {name}", "", *facts]
    training = [result for result in results if result["row"] in TRAINING]
    parts = [result for result in results if result["row"] in PARTS]
    host = [result for result in results if result["row"].startswith("host_")]
    if training:
        lines += ["", "Training with LibTitan and with PyTorch's FSDP2 (tp, atp: PyTorch's tensor parallelism). Start-up is the time from process start to the start of the first step.", ""]
        lines += training_table(training)
    if host:
        lines += ["", "Host time of a block's forward and backward under FSDP on one rank: batch 1, sequence 8, width 64.", ""]
        lines += host_table(host)
    for checkpoint in (result for result in results if result["row"] == "checkpoint"):
        lines += ["", "A 134M Llama with AdamW's state, saved and loaded by 2 ranks: seconds, and MiB of memory above what a rank had before.", ""]
        lines += checkpoint_table(checkpoint)
    if parts:
        lines += ["", "Single parts.", ""]
        lines += parts_table(parts)
    return "\n".join(lines) + "\n"


def parse_options() -> tuple[argparse.Namespace, Plan]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of a few steps with small sizes, to check that everything works")
    parser.add_argument("--name", help="write benchmarks/results/NAME.md")
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated list; default: all rows")
    for field in dataclasses.fields(Plan):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=None)
    options = parser.parse_args()
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Plan) if getattr(options, f.name) is not None}
    return options, dataclasses.replace(QUICK if options.quick else Plan(), **given)


def main() -> int:
    options, plan = parse_options()
    names = options.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        sys.exit(f"unknown rows: {', '.join(unknown)}; known are {', '.join(ROWS)}")
    facts = environment(plan)
    results, failed = [], False
    for name in names:
        try:
            results.append(measure(name, plan))
            print(json.dumps(results[-1]), flush=True)
        except CommandFailed as error:
            failed = True
            print(json.dumps({"row": name, "error": str(error)}), flush=True)
    text = report(options.name or processor(), facts, results)
    print(text)
    if options.name:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{options.name}.md").write_text(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
