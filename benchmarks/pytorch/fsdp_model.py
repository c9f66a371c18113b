"""The reference Llama under PyTorch's FSDP2, wrapped, initialized and stepped as in TorchTitan."""

import pathlib
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "scripts/reference"))

from llama3 import IGNORE_INDEX, Llama3, ModelArgs, summed_loss  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def init_ranks(rank: int, ranks: int, store_file: str, device: str = "cpu") -> DeviceMesh:
    """Joins the group of all ranks (gloo, or NCCL on "cuda") through a store in `store_file`."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store_file, ranks), rank=rank, world_size=ranks)
    return init_device_mesh(device, (ranks,), mesh_dim_names=("fsdp",))


def policy(dtype: str) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)


def shard(model: Llama3, mesh: DeviceMesh, dtype: str) -> None:
    """TorchTitan's groups: embedding, each block, [norm, output] (stays gathered, because its backward comes first), root."""
    settings = {"mesh": mesh, "mp_policy": policy(dtype)}
    fully_shard(model.tok_embeddings, reshard_after_forward=True, **settings)
    for layer in model.layers.values():
        fully_shard(layer, reshard_after_forward=True, **settings)
    fully_shard([model.norm, model.output], reshard_after_forward=False, **settings)
    fully_shard(model, **settings)
    if mesh.size() > 1:
        for module in model.modules():
            if isinstance(module, FSDPModule):  # the loss is already divided by the global count, so gradients are summed
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


# Random initial weights on a CPU mesh repeat from shard to shard; that doesn't matter for speed.
warnings.filterwarnings("ignore", message="DTensor random operators")


def build_model(args: ModelArgs, mesh: DeviceMesh, dtype: str, convert: Callable[[Llama3], None] | None = None) -> Llama3:
    """Builds the model on the meta device, converts and shards it, then allocates and initializes it shard by shard."""
    with torch.device("meta"):
        model = Llama3(args)
    if convert:
        convert(model)
    shard(model, mesh, dtype)
    model.to_empty(device=mesh.device_type)
    model.init_weights()
    model.set_rope()
    model.rope = model.rope.to(mesh.device_type)
    return model


class Trainer:
    """One optimizer step as in TorchTitan: token count over all ranks, forward, backward, clipping, fused AdamW, loss over all ranks."""

    def __init__(self, model: Llama3, max_norm: float = 1.0, loss: Callable[[Tensor, Tensor], Tensor] = summed_loss):
        self.model = model
        self.max_norm = max_norm
        self.loss = loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)

    def step(self, input_BS: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss over all ranks and the gradient norm, on the device: nothing here waits for it."""
        self.optimizer.zero_grad()
        count = (labels_BS != IGNORE_INDEX).sum()
        dist.all_reduce(count)
        loss = self.loss(self.model(input_BS), labels_BS) / count
        loss.backward()
        norm = self.clip()
        self.optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        return total, norm

    @torch.no_grad()
    def clip(self) -> Tensor:
        gradients = [parameter.grad for parameter in self.model.parameters()]
        norm = nn.utils.get_total_norm(gradients).full_tensor()
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self.max_norm, norm)
        return norm
