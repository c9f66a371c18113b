#!/usr/bin/env python3
"""Every parameter's gradient in the first step of a recorded run, by PyTorch in float64 (rotary table too), before clipping.

    .venv/bin/python scripts/reference/gradients.py tests/data/parity/mini tests/data/golden/mini_grads.safetensors

The folder holds titan.safetensors, input.npy, labels.npy and fixture.json (of which only `model` is read). The output has one F64
tensor per parameter under the parameter's name, and the loss as the scalar `loss`.
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
    options = parser.parse_args()
    run = read_run(options.run)
    model = run.model(torch.float64)
    loss = loss_of(model, run.input[0], run.labels[0])
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    save(options.output, {"loss": loss.detach()} | gradients)
    print(f"{options.output}: {len(gradients)} gradients, loss {loss.item():.12f}")


if __name__ == "__main__":
    main()
