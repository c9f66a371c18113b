#!/usr/bin/env python3
"""Counts what one more block of an 8B Llama adds to a step of PyTorch's FSDP2, eager, on two ranks with 8,192 tokens each in bf16. Prints one
JSON object. LibTitan's side is the test virtual_gpu.block; both count on virtual GPUs (docs/virtual_gpu.md), which must be built:

    .venv/bin/python benchmarks/pytorch/count_launches.py
"""

import argparse
import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
COLLECTIVES = ("ncclAllGather", "ncclReduceScatter", "ncclAllReduce")
# Limited by computing, by the network, or not part of the block.
NOT_MEMORY_BOUND = (*COLLECTIVES, "aten::mm", "aten::mm.dtype", "aten::addmm", "aten::addmm_", "aten::_scaled_dot_product_cudnn_attention",
                    "aten::_scaled_dot_product_cudnn_attention_backward", "aten::_scaled_dot_product_flash_attention",
                    "aten::_scaled_dot_product_flash_attention_backward", "aten::_foreach_norm", "aten::_foreach_mul_", "aten::_fused_adamw_")


def count_step(mesh, num_layers: int, seq_len: int) -> dict:
    import torch
    from fsdp_model import Trainer, build_model
    from llama3 import ModelArgs

    program = ctypes.CDLL(None)
    program.virtual_gpu_count.restype = ctypes.c_uint64

    def count(field: str, name: str | None = None) -> int:
        return program.virtual_gpu_count(field.encode(), None, name and name.encode())

    args = ModelArgs(dim=4096, n_layers=num_layers, n_heads=32, n_kv_heads=8, vocab_size=1024, multiple_of=1024, ffn_dim_multiplier=1.3, max_seq_len=seq_len)
    trainer = Trainer(build_model(args, mesh, "bf16"))
    tokens = torch.zeros((1, seq_len), dtype=torch.long, device="cuda")
    for _ in range(3):
        program.virtual_gpu_start_counting()
        trainer.step(tokens, tokens)
    moved = lambda name: count("bytes_read", name) + count("bytes_written", name)  # noqa: E731
    return {
        "launches": count("launches"),
        "operations": count("launches") - sum(count("launches", name) for name in COLLECTIVES),
        "memory_bound_gb": (moved(None) - sum(moved(name) for name in NOT_MEMORY_BOUND)) / 1e9,
    }


def run_rank(rank: int, folder: str) -> None:
    import torch
    from fsdp_model import init_ranks

    torch.cuda.set_device(rank)
    mesh = init_ranks(rank, 2, folder + "/store", "cuda")
    two, three = (count_step(mesh, layers, 8192) for layers in (2, 3))
    if rank == 0:
        print(json.dumps({key: round(three[key] - two[key], 3) for key in two}), flush=True)
    os._exit(0)  # the end of an NCCL group would wait for the other rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.folder)
    environment = os.environ | {"VIRTUAL_GPU_MEMORY_ONLY": "1", "VIRTUAL_GPU_POISON": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [ROOT / "scripts/virtual_gpus.sh", "2", "--", sys.executable, __file__, "--folder", folder, "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
        sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
