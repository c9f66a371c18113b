#!/usr/bin/env python3
"""Makes tests/data/golden/float8.safetensors: torchao's results for small linear layers, for the unit tests of float8.

    .venv/bin/python scripts/make_float8_golden.py

tests/data/golden/README.md describes the file.
"""

import dataclasses
import pathlib
import sys

import torch
from torch import Tensor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "reference"))

from float8_cases import Sizes, Tensors, cases, save_golden  # noqa: E402: first, as it turns off torchao's warnings
from torchao.float8 import Float8LinearConfig  # noqa: E402
from torchao.float8.config import CastConfig, ScalingType  # noqa: E402
from torchao.float8.float8_linear import Float8Linear  # noqa: E402
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic  # noqa: E402
from torchao.float8.float8_training_tensor import LinearMMConfig  # noqa: E402

SIZES = Sizes(tokens=24, features_in=32, features_out=16, padded_tokens=19)
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def cast(tensor: Tensor, config: CastConfig, dim: int, power_of_two: bool):
    return hp_tensor_to_float8_dynamic(
        tensor,
        config.target_dtype,
        LinearMMConfig(),
        scaling_granularity=config.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(dim, config.scaling_granularity),
        round_scales_to_power_of_2=power_of_two,
    )


def casts(config: Float8LinearConfig, tensors: Tensors) -> Tensors:
    """The operands of the three products: values as bytes, and scales."""
    # By rows for x and W in x W^T and for g in g W; by columns where the product sums over rows.
    operands = {
        "output.x": ("x", config.cast_config_input, -1),
        "output.weight": ("weight", config.cast_config_weight, -1),
        "grad_input.grad": ("grad", config.cast_config_grad_output, -1),
        "grad_input.weight": ("weight", config.cast_config_weight_for_grad_input, 0),
        "grad_weight.grad": ("grad", config.cast_config_grad_output_for_grad_weight, 0),
        "grad_weight.x": ("x", config.cast_config_input_for_grad_weight, 0),
    }
    result = {}
    for name, (source, cast_config, dim) in operands.items():
        if cast_config.scaling_type is ScalingType.DISABLED:
            continue
        scaled = cast(tensors[source], cast_config, dim, config.round_scales_to_power_of_2)
        result[f"{name}.data"] = scaled._data.view(torch.uint8)
        result[f"{name}.scale"] = scaled._scale
    return result


def layer(config: Float8LinearConfig, tensors: Tensors) -> Tensors:
    """The output and the gradients of torchao's emulated layer."""
    linear = torch.nn.Linear(SIZES.features_in, SIZES.features_out, bias=False)
    linear.weight = torch.nn.Parameter(tensors["weight"].clone())
    float8 = Float8Linear.from_float(linear, dataclasses.replace(config, emulate=True))
    x = tensors["x"].clone().requires_grad_()
    y = float8(x)
    y.backward(tensors["grad"])
    return {"output": y.detach(), "grad_x": x.grad, "grad_weight": float8.weight.grad}


def main() -> None:
    golden: Tensors = {}
    for name, tensors in cases(SIZES).items():
        golden |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        for recipe in RECIPES:
            config = Float8LinearConfig.from_recipe_name(recipe)
            found = casts(config, tensors) | layer(config, tensors)
            golden |= {f"{name}.{recipe}.{key}": tensor for key, tensor in found.items()}
    save_golden("float8.safetensors", golden)


if __name__ == "__main__":
    main()
