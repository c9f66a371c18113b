#!/usr/bin/env python3
"""Measures the host time of a transformer block under PyTorch's FSDP2 on one rank, with --ranks N as one of N whose peers are fake, or
with --tp N under its tensor parallelism with fake peers. Shapes are so small that the arithmetic hardly counts. With --device cuda it runs on a virtual GPU, whose own work is left out.

    .venv/bin/python benchmarks/pytorch/host_time.py [--dtype bf16]
    scripts/virtual_gpus.sh 1 -- .venv/bin/python benchmarks/pytorch/host_time.py --dtype bf16 --ranks 2 --device cuda

Prints one JSON object: us_per_block, the median over repetitions of (forward + backward of 8 blocks) / 8, and the least; with batch 1, sequence 8,
width 64, 4 heads, feed-forward 192; gradients are dropped between repetitions. Uses one thread.
"""

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time

os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fsdp_model import init_ranks, policy  # noqa: E402
from llama3 import ModelArgs, TransformerBlock, rope_table  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

BLOCKS = 8
PROGRAM = ctypes.CDLL(None)
ARGS = ModelArgs(dim=64, n_heads=4, multiple_of=64, max_seq_len=8)


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(TransformerBlock(ARGS) for _ in range(BLOCKS))
        self.register_buffer("rope", rope_table(ARGS))

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_BSD = layer(x_BSD, self.rope)
        return x_BSD


def join_fake(ranks: int, device: str) -> DeviceMesh:
    """Collective calls return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    return init_device_mesh(device, (ranks,))


def cut(model: Blocks, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import parallelize_module
    from tp_model import block_plan

    for layer in model.layers:
        parallelize_module(layer, mesh, block_plan())


def own_work_s() -> float:
    """The time of the virtual GPU's own work; 0 without one."""
    if not hasattr(PROGRAM, "virtual_gpu_own_ns"):
        return 0.0
    PROGRAM.virtual_gpu_own_ns.restype = ctypes.c_uint64
    return PROGRAM.virtual_gpu_own_ns() * 1e-9


def pass_s(model: Blocks, x_BSD: torch.Tensor) -> tuple[float, float]:
    """The host's time, and the virtual GPU's own."""
    own = own_work_s()
    begin = time.perf_counter()
    out_BSD = model(x_BSD)
    out_BSD.backward(torch.ones_like(out_BSD))
    end = time.perf_counter()
    own = own_work_s() - own
    model.zero_grad()
    return end - begin - own, own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Blocks().to(options.device)
        if options.tp > 1:
            cut(model, join_fake(options.tp, "cpu"))
        else:
            one = options.ranks == 1
            mesh = init_ranks(0, 1, os.path.join(folder, "store"), options.device) if one else join_fake(options.ranks, options.device)
            for module in (*model.layers, model):
                fully_shard(module, mesh=mesh, mp_policy=policy(options.dtype))
        x_BSD = torch.randn(1, ARGS.max_seq_len // options.tp, ARGS.dim, device=options.device, requires_grad=True)
        times = [pass_s(model, x_BSD) for _ in range(options.repetitions + 20)][20:]
        host_us, own_us = (statistics.median(each) / BLOCKS * 1e6 for each in zip(*times))
        least_us = min(host for host, _ in times) / BLOCKS * 1e6
        print(json.dumps({"us_per_block": host_us, "least_us_per_block": least_us} | ({"left_out_us_per_block": own_us} if options.device == "cuda" else {})), flush=True)
        if options.device == "cuda":
            os._exit(0)  # the end of an NCCL group needn't be waited for
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
