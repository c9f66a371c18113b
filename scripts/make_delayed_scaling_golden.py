#!/usr/bin/env python3
"""Makes tests/data/golden/delayed_scaling.safetensors: scales from histories of largest magnitudes, for the unit tests of float8.

    .venv/bin/python scripts/make_delayed_scaling_golden.py

torchao had delayed scaling until 0.8. The installed version doesn't, so this script repeats its arithmetic
(float8_utils.py: tensor_to_amax, amax_history_to_scale; float8_linear_utils.py: sync_float8_amax_and_scale_history) with
two changes that docs/float8.md describes: all micro-batches of a step count, not only the last one, and values that aren't
finite aren't remembered. tests/data/golden/README.md describes the file.
"""

import pathlib
import sys

import torch
from torch import Tensor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "reference"))

from float8_cases import Tensors, draw, save_golden  # noqa: E402

STEPS, MICRO_BATCHES, HISTORY_LEN, ROWS, COLUMNS = 9, 2, 4, 4, 8
EPSILON = 1e-12
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    return (LARGEST[dtype] / torch.clamp(amax.to(torch.float64), min=EPSILON)).to(torch.float32)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def run(x: Tensor, dtype: torch.dtype) -> Tensors:
    """x: [steps, micro-batches, rows, columns]."""
    history = torch.zeros(HISTORY_LEN)
    scales, histories, data = [], [], []
    for step in range(x.shape[0]):
        pending = torch.zeros(())
        for matrix in x[step]:
            amax = matrix.abs().max()
            largest = history.max()
            scale = scale_of(largest if largest > 0 else amax, dtype)
            if not torch.isfinite(amax):
                scale = torch.tensor(float("nan"))
            else:
                pending = torch.maximum(pending, amax)
            scales.append(scale)
            data.append(cast(matrix, scale, dtype).view(torch.uint8))
        history = torch.roll(history, 1)
        history[0] = pending
        histories.append(history.clone())
    shape = x.shape[:2]
    return {"scale": torch.stack(scales).view(shape), "history": torch.stack(histories), "data": torch.stack(data).view(x.shape)}


def main() -> None:
    x = draw(1, STEPS, MICRO_BATCHES, ROWS, COLUMNS)
    x *= torch.pow(2.0, torch.tensor([0.0, 1, 3, 2, -4, -4, -5, -6, 2])).view(-1, 1, 1, 1)  # outgrows its history; shrinks
    x[4, 1, 2, 3] = float("inf")
    x[5, 0, 1, 1] = float("nan")
    golden = {"x": x}
    for dtype, name in ((torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2")):
        golden |= {f"{name}.{key}": tensor for key, tensor in run(x, dtype).items()}
    golden |= {f"zeros.{key}": tensor for key, tensor in run(torch.zeros_like(x), torch.float8_e4m3fn).items()}
    save_golden("delayed_scaling.safetensors", golden)


if __name__ == "__main__":
    main()
