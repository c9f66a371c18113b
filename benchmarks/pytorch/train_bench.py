#!/usr/bin/env python3
"""Trains a Llama with PyTorch's FSDP2, with --tp its tensor parallelism or with --pp its pipelines, over gloo on the CPU. Prints one JSON
object, to compare with `titan train`.

    .venv/bin/python benchmarks/pytorch/train_bench.py --model debug --dtype bf16 --ranks 2 --steps 5 --warmup 2

Keys: tokens_per_s (all ranks' tokens of a step over the median step time after the warm-up), step_s (each step after the warm-up, of
the slowest rank), loss (of each step, including the warm-up), startup_s (process start to the start of the first step, slowest rank),
peak_rss_mib (largest rank). Each rank is a process with cores / ranks threads, unless OMP_NUM_THREADS says otherwise.
"""

import argparse
import ctypes
import json
import os
import pathlib
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time

MODELS = {
    "debug": {"dim": 256, "n_layers": 6, "n_heads": 16, "vocab_size": 2048},
    "134m": {"dim": 768, "n_layers": 12, "n_heads": 12, "vocab_size": 32000},
}
SHAPES = {"debug": (8, 2048), "134m": (4, 512)}  # sequences per rank, tokens per sequence


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="debug")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after the warm-up")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--local-batch-size", type=int, help="sequences per rank; default: 8 (debug), 4 (134m)")
    parser.add_argument("--seq-len", type=int, help="default: 2048 (debug), 512 (134m)")
    parser.add_argument("--tp", action="store_true", help="tensor, sequence and loss parallel over all ranks, in fp32")
    parser.add_argument("--pp", metavar="SCHEDULE", help="pipeline parallel over all ranks, in fp32, by a schedule of torch.distributed.pipelining")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches per step, with --pp; must divide the sequences")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--launch-s", type=float, help=argparse.SUPPRESS)  # how long the process that started this rank had been running
    options = parser.parse_args()
    if (options.tp or options.pp) and options.dtype != "fp32":
        parser.error("--tp and --pp run in fp32")
    if options.tp and options.pp:
        parser.error("--tp or --pp, not both")
    batch, length = SHAPES[options.model]
    options.local_batch_size = options.local_batch_size or batch
    options.seq_len = options.seq_len or length
    return options


def seconds_since_process_start() -> float:
    """Measured in the kernel's clock ticks of 1/100 s; includes interpreter start and imports."""
    start_ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(pathlib.Path("/proc/uptime").read_text().split()[0])
    return uptime - start_ticks / os.sysconf("SC_CLK_TCK")


def run_rank(options: argparse.Namespace) -> dict:
    from fsdp_model import ModelArgs, Trainer, build_model, init_ranks

    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    mesh = init_ranks(options.rank, options.ranks, os.path.join(options.folder, "store"))
    args = ModelArgs(**MODELS[options.model], max_seq_len=options.seq_len)
    if options.tp:
        import tp_model

        trainer = tp_model.TpTrainer(tp_model.build_model(args, mesh))
    elif options.pp:
        import pp_model

        trainer = pp_model.PipelineTrainer(args, options.pp, options.rank, options.ranks, options.micro_batches)
    else:
        trainer = Trainer(build_model(args, mesh, options.dtype))
    generator = torch.Generator().manual_seed(0 if options.tp or options.pp else options.rank)
    shape = (options.local_batch_size, options.seq_len + 1)
    startup_s = options.launch_s + seconds_since_process_start()
    step_s, losses = [], []
    for _ in range(options.warmup + options.steps):
        begin = time.perf_counter()
        tokens = torch.randint(MODELS[options.model]["vocab_size"], shape, generator=generator)
        loss, _ = trainer.step(tokens[:, :-1], tokens[:, 1:])
        step_s.append(time.perf_counter() - begin)
        losses.append(loss.item())
    dist.destroy_process_group()
    peak_rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"step_s": step_s[options.warmup :], "loss": losses, "startup_s": startup_s, "peak_rss_mib": peak_rss_mib}


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def spawn(options: argparse.Namespace, *arguments: str) -> list[dict]:
    """Runs this script once per rank with additional arguments and returns the results. Ends all ranks when one fails."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // options.ranks))
    environment = {"OMP_NUM_THREADS": threads} | os.environ
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, *arguments, "--folder", folder, "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment, preexec_fn=die_with_parent) for rank in range(options.ranks)
        ]
        while any(process.poll() is None for process in ranks) and not any(process.returncode for process in ranks):
            time.sleep(0.05)
        for process in ranks:
            if process.poll() is None:
                process.kill()
        if any(process.wait() for process in ranks):
            sys.exit(f"ranks ended with {[process.returncode for process in ranks]}")
        return [json.load(open(os.path.join(folder, f"{rank}.json"))) for rank in range(options.ranks)]


def summary(options: argparse.Namespace, ranks: list[dict]) -> dict:
    step_s = [max(times) for times in zip(*(rank["step_s"] for rank in ranks))]
    tokens = (1 if options.tp or options.pp else options.ranks) * options.local_batch_size * options.seq_len
    return {
        "tokens_per_s": tokens / statistics.median(step_s),
        "step_s": step_s,
        "loss": ranks[0]["loss"],
        "startup_s": max(rank["startup_s"] for rank in ranks),
        "peak_rss_mib": max(rank["peak_rss_mib"] for rank in ranks),
    }


def main() -> None:
    options = parse_options()
    if options.rank is None:
        launch_s = str(seconds_since_process_start())
        print(json.dumps(summary(options, spawn(options, "--launch-s", launch_s))))
        return
    result = run_rank(options)
    with open(os.path.join(options.folder, f"{options.rank}.json"), "w") as file:
        json.dump(result, file)
    os._exit(0)  # gloo's threads sometimes abort the process when the interpreter shuts down


if __name__ == "__main__":
    main()
