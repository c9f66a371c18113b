#!/usr/bin/env python3
"""Makes tests/data/golden/mxfp8.safetensors: what torchao gives for small linear layers in MXFP8, for the unit tests of float8.

    .venv/bin/python scripts/make_mxfp8_golden.py

tests/data/golden/README.md says what the file holds.
"""

import pathlib
import sys
import warnings

import torch
from torch import Tensor

warnings.filterwarnings("ignore")

from torchao.prototype.mx_formats.config import (  # noqa: E402
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.mx_linear import mx_mm  # noqa: E402
from torchao.prototype.mx_formats.mx_tensor import to_mx  # noqa: E402
from torchao.prototype.mx_formats.utils import to_blocked  # noqa: E402
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference  # noqa: E402

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "scripts/reference"))

from safetensors_file import save  # noqa: E402

TOKENS, IN, OUT, BLOCK = 64, 64, 32, 32
MODES = {"mxfp8_cublas": ScaleCalculationMode.FLOOR, "mxfp8_cublas_rceil": ScaleCalculationMode.RCEIL}
Tensors = dict[str, Tensor]


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(dtype: torch.dtype, tokens: int = TOKENS) -> Tensors:
    """x, weight and the output's gradient, of the magnitudes that they have in training."""
    shapes = {"x": (draw(1, tokens, IN), 1.0), "weight": (draw(2, OUT, IN), 0.02), "grad": (draw(3, tokens, OUT), 1e-4)}
    return {name: (tensor * factor).to(dtype) for name, (tensor, factor) in shapes.items()}


def changed(tensors: Tensors, **changes) -> Tensors:
    """A copy with single elements set: name = {(row, column): value}."""
    result = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, elements in changes.items():
        for place, value in elements.items():
            result[name][place] = value
    return result


def cases() -> dict[str, Tensors]:
    plain = inputs(torch.bfloat16)
    infinity, nan = float("inf"), float("nan")
    powers = torch.pow(2.0, torch.arange(TOKENS) % 20 - 10.0).unsqueeze(1)
    return {
        "bf16": plain,
        "fp32": inputs(torch.float32),
        "padding": inputs(torch.bfloat16, tokens=50),  # no whole blocks of tokens
        "zeros": plain | {"x": torch.zeros_like(plain["x"]), "grad": torch.zeros_like(plain["grad"])},
        "infinity": changed(plain, x={(3, 5): infinity}, grad={(7, 2): -infinity}),
        "nan": changed(plain, x={(3, 5): nan}, weight={(2, 1): nan}),
        "denormal": {name: tensor * 1e-38 for name, tensor in inputs(torch.float32).items()},
        "outlier": changed(plain, x={(0, 0): 3e4}, weight={(1, 1): -2e3}, grad={(2, 3): 1e3}),
        "extreme": changed(inputs(torch.float32), x={(0, 0): 3.4e38, (1, 0): 1e-45}),
        # Largest magnitudes at and just above the end of the format's range.
        "edges": plain | {"x": (powers * torch.tensor([448.0, 450.0]).repeat_interleave(BLOCK)).to(torch.bfloat16)},
    }


def whole_blocks(tensor: Tensor) -> Tensor:
    """With rows of zeros behind it: torchao takes whole blocks only, and zeros add nothing to sums."""
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
    for name, tensors in cases().items():
        golden |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        for recipe, mode in MODES.items():
            found = casts(mode, tensors) | layer(mode, tensors)
            golden |= {f"{name}.{recipe}.{key}": tensor for key, tensor in found.items()}
    save(REPOSITORY / "tests/data/golden/mxfp8.safetensors", golden)


if __name__ == "__main__":
    main()
