#!/usr/bin/env python3
"""Makes tests/data/golden/mxfp8.safetensors: what torchao gives for small linear layers in MXFP8, for the unit tests of float8.

    .venv/bin/python scripts/make_mxfp8_golden.py

tests/data/golden/README.md says what the file holds.
"""

import pathlib
import sys

import torch
from torch import Tensor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "reference"))

from float8_cases import Sizes, Tensors, cases, save_golden  # noqa: E402: first, as it turns off torchao's warnings
from torchao.prototype.mx_formats.config import (  # noqa: E402
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.mx_linear import mx_mm  # noqa: E402
from torchao.prototype.mx_formats.mx_tensor import to_mx  # noqa: E402
from torchao.prototype.mx_formats.utils import to_blocked  # noqa: E402
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference  # noqa: E402

BLOCK = 32
SIZES = Sizes(tokens=64, features_in=64, features_out=32, padded_tokens=50)
MODES = {"mxfp8_cublas": ScaleCalculationMode.FLOOR, "mxfp8_cublas_rceil": ScaleCalculationMode.RCEIL}


def block_cases() -> dict[str, Tensors]:
    """With largest magnitudes at and just above the end of the format's range."""
    shared = cases(SIZES)
    powers = torch.pow(2.0, torch.arange(SIZES.tokens) % 20 - 10.0).unsqueeze(1)
    edges = (powers * torch.tensor([448.0, 450.0]).repeat_interleave(BLOCK)).to(torch.bfloat16)
    return shared | {"edges": shared["bf16"] | {"x": edges}}


def whole_blocks(tensor: Tensor) -> Tensor:
    """Appends rows of zeros: torchao takes whole blocks only, and zeros add nothing to sums."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, -tensor.shape[0] % BLOCK))


def casts(mode: ScaleCalculationMode, tensors: Tensors) -> Tensors:
    """The operands of the three products, each vector that is summed over a row: values and exponents as bytes."""
    x, weight, grad = (whole_blocks(tensors[name]) for name in ("x", "weight", "grad"))
    operands = {
        "output.x": tensors["x"],
        "output.weight": tensors["weight"],
        "grad_input.grad": tensors["grad"],
        "grad_input.weight": weight.t().contiguous(),
        "grad_weight.grad": grad.t().contiguous(),
        "grad_weight.x": x.t().contiguous(),
    }
    result = {}
    for name, operand in operands.items():
        scale, data = to_mx(operand, torch.float8_e4m3fn, BLOCK, mode)
        result |= {f"{name}.data": data.view(torch.uint8), f"{name}.scale": scale.view(torch.uint8)}
    return result


def layer(mode: ScaleCalculationMode, tensors: Tensors) -> Tensors:
    """The output and the gradients by torchao's products, emulated."""
    tokens = tensors["x"].shape[0]
    x = whole_blocks(tensors["x"]).requires_grad_()
    weight = tensors["weight"].clone().requires_grad_()
    e4m3 = torch.float8_e4m3fn
    y = mx_mm.apply(
        x,
        weight,
        *(e4m3, e4m3, e4m3, BLOCK),
        KernelPreference.EMULATED,
        MXFP8Dim0CastKernelChoice.TORCH,
        MXFP8Dim1CastKernelChoice.TORCH,
        mode,
        False,
    )
    y.backward(whole_blocks(tensors["grad"]))
    return {"output": y.detach()[:tokens], "grad_x": x.grad[:tokens], "grad_weight": weight.grad}


def layouts() -> Tensors:
    """Exponents, and how cuBLAS reads them."""
    found = {}
    for rows, columns in ((128, 4), (200, 3), (300, 10)):
        scale = (torch.arange(rows * columns) % 251).to(torch.uint8).view(rows, columns)
        found |= {f"layout.{rows}x{columns}.plain": scale, f"layout.{rows}x{columns}.blocked": to_blocked(scale)}
    return found


def main() -> None:
    golden: Tensors = layouts()
    for name, tensors in block_cases().items():
        golden |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        for recipe, mode in MODES.items():
            found = casts(mode, tensors) | layer(mode, tensors)
            golden |= {f"{name}.{recipe}.{key}": tensor for key, tensor in found.items()}
    save_golden("mxfp8.safetensors", golden)


if __name__ == "__main__":
    main()
