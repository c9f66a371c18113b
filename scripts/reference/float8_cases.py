"""Inputs of small linear layers and the output folder, shared by the scripts that make Float8's golden files."""

import dataclasses
import pathlib
import warnings

import torch
from safetensors_file import save
from torch import Tensor

warnings.filterwarnings("ignore")  # on import, torchao warns about extensions that the reference doesn't need

FOLDER = pathlib.Path(__file__).resolve().parent.parent.parent / "tests/data/golden"
Tensors = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a linear layer. `padded_tokens` is a number of tokens that isn't a multiple of what a recipe requires."""

    tokens: int
    features_in: int
    features_out: int
    padded_tokens: int


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(sizes: Sizes, dtype: torch.dtype, tokens: int | None = None) -> Tensors:
    """x, weight and the output's gradient, with magnitudes as in training."""
    tokens = tokens or sizes.tokens
    drawn = {
        "x": (draw(1, tokens, sizes.features_in), 1.0),
        "weight": (draw(2, sizes.features_out, sizes.features_in), 0.02),
        "grad": (draw(3, tokens, sizes.features_out), 1e-4),
    }
    return {name: (tensor * factor).to(dtype) for name, (tensor, factor) in drawn.items()}


def changed(tensors: Tensors, **changes) -> Tensors:
    """A copy with single elements set: name = {(row, column): value}."""
    result = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, elements in changes.items():
        for place, value in elements.items():
            result[name][place] = value
    return result


def cases(sizes: Sizes) -> dict[str, Tensors]:
    plain, wide = inputs(sizes, torch.bfloat16), inputs(sizes, torch.float32)
    infinity, nan = float("inf"), float("nan")
    return {
        "bf16": plain,
        "fp32": wide,
        "padding": inputs(sizes, torch.bfloat16, tokens=sizes.padded_tokens),
        "zeros": plain | {"x": torch.zeros_like(plain["x"]), "grad": torch.zeros_like(plain["grad"])},
        "infinity": changed(plain, x={(3, 5): infinity}, grad={(7, 2): -infinity}),
        "nan": changed(plain, x={(3, 5): nan}, weight={(2, 1): nan}),
        "denormal": {name: tensor * 1e-38 for name, tensor in wide.items()},
        "outlier": changed(plain, x={(0, 0): 3e4}, weight={(1, 1): -2e3}, grad={(2, 3): 1e3}),
        "extreme": changed(wide, x={(0, 0): 3.4e38, (1, 0): 1e-45}),
    }


def save_golden(file: str, golden: Tensors) -> None:
    save(FOLDER / file, golden)
