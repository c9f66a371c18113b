"""The reference Llama under PyTorch's tensor, sequence and loss parallelism, planned and stepped as in TorchTitan."""

import torch
from fsdp_model import IGNORE_INDEX, Llama3, ModelArgs, Trainer, summed_loss
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def block_plan() -> dict:
    """TorchTitan's plan for a transformer block."""
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }


def parallelize(model: Llama3, mesh: DeviceMesh) -> None:
    """TorchTitan's plan: sequence parallel between the products; one gather for wq, wk and wv, and one for w1 and w3."""
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for layer in model.layers.values():
        parallelize_module(layer, mesh, block_plan())


def build_model(args: ModelArgs, mesh: DeviceMesh) -> Llama3:
    """Builds the model on the meta device, applies the plan, then allocates and initializes it part by part."""
    with torch.device("meta"):
        model = Llama3(args)
    parallelize(model, mesh)
    model.to_empty(device=mesh.device_type)
    model.init_weights()
    model.set_rope()
    model.rope = model.rope.to(mesh.device_type)
    return model


class TpTrainer(Trainer):
    """All ranks have the same batch, so the loss isn't summed over ranks."""

    def step(self, input_BS: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad()
        count = int((labels_BS != IGNORE_INDEX).sum())
        with loss_parallel():
            loss = summed_loss(self.model(input_BS), labels_BS) / count
            loss.backward()
        norm = self.clip()
        self.optimizer.step()
        return loss.detach().full_tensor(), norm
