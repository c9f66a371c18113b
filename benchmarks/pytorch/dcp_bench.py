#!/usr/bin/env python3
"""Saves and loads a Llama with AdamW's state under FSDP2 with torch.distributed.checkpoint, over gloo on the CPU, and prints one JSON
object. LibTitan's side is checkpoint_bench.

    .venv/bin/python benchmarks/pytorch/dcp_bench.py --model 134m --ranks 2 --checkpoints /var/tmp

Keys are medians over the runs after one warm-up run, of the slowest rank in each:
  save_s                    dcp.save with its default writer, which syncs
  async_blocked_s           how long dcp.async_save blocks its caller, with a stager that keeps its memory from save to save
  async_total_s             the same until the state is written
  async_default_blocked_s   as async_blocked_s, with the stager that DCP chooses, which allocates its memory anew (as TorchTitan's mode `async`)
  async_taken_s             everything that the save takes from computation at the same time, as checkpoint_bench counts it
  load_s, load_warm_s       dcp.load into the tensors, with the files outside and inside the page cache
  gigabytes                 size of all ranks' tensors
  save_extra_mib, async_extra_mib   peak memory of a rank above what it had before
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import sys
import time

from train_bench import MODELS, spawn


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="134m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--span", type=float, default=4, help="seconds of computation during an asynchronous save")
    parser.add_argument("--checkpoints", default="/var/tmp", help="a folder on the disk to measure")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def memory_mib(key: str) -> float:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


class ExtraMemory:
    """The process's peak memory above its memory at construction."""

    def __init__(self):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self.before = memory_mib("VmRSS")

    def mib(self) -> float:
        return memory_mib("VmHWM") - self.before


def drop_from_memory(folder: pathlib.Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def trained_state(options: argparse.Namespace) -> dict:
    """Sharded model and optimizer state as TorchTitan saves them, after a step on random gradients."""
    from fsdp_model import ModelArgs, Trainer, build_model, init_ranks

    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    mesh = init_ranks(options.rank, options.ranks, os.path.join(options.folder, "store"))
    trainer = Trainer(build_model(ModelArgs(**MODELS[options.model], max_seq_len=512), mesh, "fp32"))
    for parameter in trainer.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    model, optimizer = get_state_dict(
        trainer.model, trainer.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    return {"model": model, "optimizer": optimizer}


def num_bytes(state: dict) -> int:
    tensors = [value for part in state.values() for value in part.values() if hasattr(value, "to_local")]
    return sum(tensor.to_local().nbytes for tensor in tensors)


def measure(options: argparse.Namespace, state: dict) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed._state_dict_utils import _create_cpu_state_dict
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    folder = pathlib.Path(options.checkpoints) / f"dcp_bench.{pathlib.Path(options.folder).name}"
    background = dist.new_group(backend="gloo")
    # DefaultStager frees its memory after each save (and fails if it is used again). This stager keeps its memory. It would pin it,
    # which needs a GPU, so the memory is allocated here.
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    figures: dict[str, list[float]] = {}

    def timed(name: str, call):
        dist.barrier()
        begin = time.perf_counter()
        result = call()
        figures.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    def clear():
        dist.barrier()
        if options.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()
        dist.barrier()

    factor = torch.ones(256, 256)

    def products(seconds: float) -> int:
        end, count = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            torch.mm(factor, factor)
            count += 1
        return count

    def async_save():
        future = dcp.async_save(state, checkpoint_id=folder, process_group=background, async_stager=stager)
        return getattr(future, "upload_completion", future)

    # The call that TorchTitan's mode `async` makes.
    def async_save_by_default():
        future = dcp.async_save(state, checkpoint_id=folder, process_group=background)
        return getattr(future, "upload_completion", future)

    def seconds_taken() -> float:
        clear()
        per_second = products(options.span / 2) / (options.span / 2)
        dist.barrier()
        begin, count = time.perf_counter(), 0
        future = async_save()
        while time.perf_counter() - begin < options.span or not future.done():
            count += products(0.3)
        taken = time.perf_counter() - begin - count / per_second
        future.result()
        return taken

    for _ in range(options.runs + 1):
        clear()
        memory = ExtraMemory()
        timed("save_s", lambda: dcp.save(state, checkpoint_id=folder))
        figures.setdefault("save_extra_mib", []).append(memory.mib())
        timed("load_warm_s", lambda: dcp.load(state, checkpoint_id=folder))
        drop_from_memory(folder)
        timed("load_s", lambda: dcp.load(state, checkpoint_id=folder))
        clear()
        memory = ExtraMemory()
        if stager.state_dict_cache is None:
            stager.state_dict_cache = _create_cpu_state_dict(state)
        products(0.3)
        begin = time.perf_counter()
        timed("async_blocked_s", async_save).result()
        figures.setdefault("async_total_s", []).append(time.perf_counter() - begin)
        figures.setdefault("async_extra_mib", []).append(memory.mib())
        figures.setdefault("async_taken_s", []).append(seconds_taken())
        clear()
        products(0.3)
        timed("async_default_blocked_s", async_save_by_default).result()
    # The stager allocates its memory in the first save, so that save's extra memory counts.
    extra = max(figures.pop("async_extra_mib"))
    clear()
    return {name: values[1:] for name, values in figures.items()} | {"async_extra_mib": [extra] * options.runs}


def run_rank(options: argparse.Namespace) -> dict:
    state = trained_state(options)
    return {"bytes": num_bytes(state), "figures": measure(options, state)}


def summary(ranks: list[dict]) -> dict:
    gigabytes = sum(rank["bytes"] for rank in ranks) * 1e-9
    slowest = {
        name: statistics.median(max(values) for values in zip(*(rank["figures"][name] for rank in ranks)))
        for name in ranks[0]["figures"]
    }
    return {"gigabytes": gigabytes} | slowest


def main() -> None:
    options = parse_options()
    if options.rank is None:
        print(json.dumps(summary(spawn(options))))
        return
    result = run_rank(options)
    with open(os.path.join(options.folder, f"{options.rank}.json"), "w") as file:
        json.dump(result, file)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the process when the interpreter shuts down


if __name__ == "__main__":
    main()
