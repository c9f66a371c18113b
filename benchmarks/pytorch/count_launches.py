#!/usr/bin/env python3
"""Counts what one more block of an 8B Llama adds to a step of PyTorch, eager, with 8,192 tokens a rank in bf16, parallelized as in TorchTitan.
Prints one JSON object: for each layout of LAYOUTS, or those named, the most that a rank counts, and the launches of each operation on the rank
with most. With --check, also compares the counts with the table in docs/gpu_performance.md. LibTitan's side is the tests virtual_gpu.block and nightly.virtual_blocks; both count on virtual GPUs (docs/virtual_gpu.md), which must
be built:

    .venv/bin/python benchmarks/pytorch/count_launches.py [--check] [LAYOUT ...]
"""

import argparse
import collections
import ctypes
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
from float8_train import convert_to
from fsdp_model import Llama3, ModelArgs, Trainer, build_model, init_ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from tp_model import TpTrainer, parallelize
from tp_model import build_model as build_tp_model

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOKENS = 8192
NCCL = ("ncclAllGather", "ncclReduceScatter", "ncclAllReduce", "ncclSend and ncclRecv")
# Limited by computing, by the network, or not part of the block.
NOT_MEMORY_BOUND = (*NCCL, "aten::mm", "cublasLtMatmul", "aten::_scaled_dot_product_cudnn_attention",
                    "aten::_scaled_dot_product_cudnn_attention_backward", "aten::_foreach_norm", "aten::_foreach_mul_", "aten::_fused_adamw_")

Step = Callable[[torch.Tensor, torch.Tensor], object]


def fsdp(convert: Callable[[Llama3], None] | None = None) -> Callable[[ModelArgs, DeviceMesh], Step]:
    return lambda args, mesh: Trainer(build_model(args, mesh, "bf16", convert)).step


def recompute_operations(model: Llama3) -> None:
    """TorchTitan's policy `op`: results of attention and of every other product are saved."""
    saved = {torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_cudnn_attention.default}

    def contexts():
        products = collections.Counter()

        def policy(context, operation, *_, **__):
            if operation == torch.ops.aten.mm.default:
                products[context.is_recompute] += 1
            is_every_second = operation == torch.ops.aten.mm.default and products[context.is_recompute] % 2 == 0
            return CheckpointPolicy.MUST_SAVE if operation in saved and not is_every_second else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    for name, layer in model.layers.items():
        model.layers[name] = checkpoint_wrapper(layer, context_fn=contexts, early_stop=False)


def tensor_parallel(args: ModelArgs, mesh: DeviceMesh) -> Step:
    """FSDP over one rank keeps the parameters in fp32 and casts them."""
    mesh = init_device_mesh("cuda", (1, mesh.size()), mesh_dim_names=("fsdp", "tp"))
    return TpTrainer(build_model(args, mesh["fsdp"], "bf16", lambda model: parallelize(model, mesh["tp"]))).step


def tensor_parallel_in_bf16(args: ModelArgs, mesh: DeviceMesh) -> Step:
    """TorchTitan 0.2 has no FSDP here, so it has no mixed precision."""
    torch.set_default_dtype(torch.bfloat16)
    return TpTrainer(build_tp_model(args, mesh)).step


def context_parallel_ring(args: ModelArgs, mesh: DeviceMesh) -> Step:
    """TorchTitan hands each block the positions of its tokens, by which the block looks up its rotations."""
    positions = torch.arange(args.max_seq_len, dtype=torch.int32, device="cuda")

    def look_up(_, inputs: tuple) -> tuple:
        x_BSD, rope, *others = inputs
        return x_BSD, rope[positions], *others

    model = build_model(args, mesh, "bf16")
    for layer in model.layers.values():
        layer.register_forward_pre_hook(look_up)
    trainer = Trainer(model)

    def step(tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> None:
        with context_parallel(mesh, buffers=[tokens_BS, labels_BS, positions], buffer_seq_dims=[1, 1, 0]):
            trainer.step(tokens_BS, labels_BS)

    return step


# Names, numbers of ranks, and what builds a model and its step.
LAYOUTS: dict[str, tuple[int, Callable[[ModelArgs, DeviceMesh], Step]]] = {
    "fsdp": (2, fsdp()),
    "fsdp_with_recompute": (2, fsdp(recompute_operations)),
    "tensor_parallel": (8, tensor_parallel),
    "tensor_parallel_in_bf16": (8, tensor_parallel_in_bf16),
    "context_parallel": (2, context_parallel_ring),
    "float8_tensorwise": (2, fsdp(convert_to("tensorwise", False, {}))),
    "float8_tensorwise_gathered": (2, fsdp(convert_to("tensorwise", False, {}, enable_fsdp_float8_all_gather=True))),
    "float8_rowwise": (2, fsdp(convert_to("rowwise", False, {}))),
}


def count_step(layout: str, mesh: DeviceMesh, num_layers: int, file: pathlib.Path) -> collections.Counter:
    seq_len = 2 * TOKENS if layout == "context_parallel" else TOKENS
    args = ModelArgs(dim=4096, n_layers=num_layers, n_heads=32, n_kv_heads=8, vocab_size=1024, multiple_of=1024, ffn_dim_multiplier=1.3, max_seq_len=seq_len)
    step = LAYOUTS[layout][1](args, mesh)
    tokens, labels = torch.zeros((2, 1, seq_len), dtype=torch.long, device="cuda")
    program = ctypes.CDLL(None)
    for _ in range(3):
        program.virtual_gpu_start_counting()
        step(tokens, labels)
        torch.cuda.synchronize()
    program.virtual_gpu_write_counts()
    counts = collections.Counter()
    for module in json.loads(file.read_text()).values():
        for name, fields in module.items():
            for field, value in fields.items():
                counts[name, field] += value
    return counts


def run_rank(layout: str, rank: int, folder: pathlib.Path) -> None:
    torch.cuda.set_device(rank)
    mesh = init_ranks(rank, LAYOUTS[layout][0], str(folder / "store"), "cuda")
    file = folder / f"rank{rank}.json"
    two, three = (count_step(layout, mesh, layers, file) for layers in (2, 3))
    three.subtract(two)
    launches = {name: value for (name, field), value in sorted(three.items()) if field == "launches" and value}
    moved = sum(value for (name, field), value in three.items() if field in ("bytes_read", "bytes_written") and name not in NOT_MEMORY_BOUND)
    counts = {
        "operations": sum(value for name, value in launches.items() if name not in NCCL),
        "launches": sum(launches.values()),
        "memory_bound_gb": round(moved / 1e9, 3),
        "by_operation": launches,
    }
    file.write_text(json.dumps(counts))
    os._exit(0)  # the end of an NCCL group would wait for the other rank


def count(layout: str) -> dict:
    environment = os.environ | {"VIRTUAL_GPU_MEMORY_ONLY": "1", "VIRTUAL_GPU_POISON": "0", "OMP_NUM_THREADS": "1"}
    ranks = LAYOUTS[layout][0]
    with tempfile.TemporaryDirectory() as folder:
        command = [ROOT / "scripts/virtual_gpus.sh", str(ranks), "--", sys.executable, "-W", "ignore", __file__, layout, "--folder", folder, "--rank"]
        files = [pathlib.Path(folder) / f"rank{rank}.json" for rank in range(ranks)]
        processes = [subprocess.Popen([*command, str(rank)], env=environment | {"VIRTUAL_GPU_COUNTERS": str(file)}) for rank, file in enumerate(files)]
        if status := max(process.wait() for process in processes):
            sys.exit(status)
        counts = [json.loads(file.read_text()) for file in files]
        most = max(counts, key=lambda of_rank: of_rank["launches"])
        return most | {"memory_bound_gb": max(of_rank["memory_bound_gb"] for of_rank in counts)}


def documented() -> dict[str, list[str]]:
    """Operations, launches and GB of the table's rows, which are in the order of LAYOUTS."""
    page = (ROOT / "docs/gpu_performance.md").read_text()
    rows = re.findall(r"^\|[^|]+\| \d+ \| \d+ \| \d+ \| [\d.]+ \| (\d+) \| (\d+) \| ([\d.]+) \|$", page, re.MULTILINE)
    return dict(zip(LAYOUTS, rows, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", metavar="LAYOUT", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.layouts[0], options.rank, options.folder)
    counts = {layout: count(layout) for layout in options.layouts}
    print(json.dumps(counts, indent=2))
    if not options.check:
        return
    for layout, of_layout in counts.items():
        counted = str(of_layout["operations"]), str(of_layout["launches"]), f"{of_layout['memory_bound_gb']:.1f}"
        if counted != (in_docs := documented()[layout]):
            sys.exit(f"{layout}: operations, launches and GB are {', '.join(counted)}, and docs/gpu_performance.md has {', '.join(in_docs)}")


if __name__ == "__main__":
    main()
