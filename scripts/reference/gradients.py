#!/usr/bin/env python3
"""Computes every parameter's gradient in one step of a replayed run, with PyTorch in float64 (rotary table included), before clipping.

    .venv/bin/python scripts/reference/gradients.py tests/data/parity/mini tests/data/golden/mini_grads.safetensors

The folder contains input.npy and labels.npy, and also titan.safetensors and fixture.json (whose `model` gives the sizes), unless --weights and --model
name other files. The output has one F64 tensor per parameter under the parameter's name, and the loss as the scalar `loss`.
"""

import argparse
import pathlib

import torch
from recorded_run import loss_of, read_run
from safetensors_file import save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--weights", type=pathlib.Path, help="safetensors file with TorchTitan's parameter names")
    parser.add_argument("--model", type=pathlib.Path, help="JSON file whose `model` holds the sizes, like fixture.json")
    parser.add_argument("--step", type=int, default=1, help="step whose batch is used (with the given weights)")
    options = parser.parse_args()
    run = read_run(options.run, options.weights, options.model)
    model = run.model(torch.float64)
    loss = loss_of(model, run.input[options.step - 1], run.labels[options.step - 1])
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    save(options.output, {"loss": loss.detach()} | gradients)
    print(f"{options.output}: {len(gradients)} gradients, loss {loss.item():.12f}")


if __name__ == "__main__":
    main()
