"""A recorded run: weights with TorchTitan's names, its batches, and the results of the framework that recorded it."""

import dataclasses
import json
import pathlib

import numpy
import torch
from llama3 import IGNORE_INDEX, Llama3, ModelArgs, RopeScaling, summed_loss
from safetensors_file import load
from torch import Tensor


@dataclasses.dataclass
class RecordedRun:
    args: ModelArgs
    training: dict
    weights: dict[str, Tensor]
    input: Tensor  # int64 [step, row, position]
    labels: Tensor  # the same shape; IGNORE_INDEX doesn't count
    record: dict  # fixture.json

    def model(self, dtype: torch.dtype) -> Llama3:
        model = Llama3(self.args)
        model.load_state_dict(self.weights)
        model.set_precision(dtype)
        return model


def read_run(folder: pathlib.Path, weights: pathlib.Path | None = None, record: pathlib.Path | None = None) -> RecordedRun:
    """`weights` and `record` default to the folder's titan.safetensors and fixture.json."""
    content = json.loads((record or folder / "fixture.json").read_text())
    return RecordedRun(
        args=model_args(content["model"]),
        training=content.get("training", {}),
        weights=load(weights or folder / "titan.safetensors"),
        input=torch.from_numpy(numpy.load(folder / "input.npy")).long(),
        labels=torch.from_numpy(numpy.load(folder / "labels.npy")).long(),
        record=content,
    )


def model_args(record: dict) -> ModelArgs:
    scaling = record.get("rope_scaling_args")
    names = {field.name for field in dataclasses.fields(ModelArgs)}
    return ModelArgs(
        **{name: value for name, value in record.items() if name in names},
        rope_scaling=scaling
        and RopeScaling(
            scaling["scaling_factor"],
            scaling["low_freq_factor"],
            scaling["high_freq_factor"],
            scaling["original_max_position_embeddings"],
        ),
    )


def loss_of(model: Llama3, input_BS: Tensor, labels_BS: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
    """The mean loss over the valid labels."""
    return summed_loss(model(input_BS, mask_B1SS), labels_BS) / (labels_BS != IGNORE_INDEX).sum()
