"""The reference Llama under PyTorch's pipeline parallelism (torch.distributed.pipelining), split and stepped as in TorchTitan."""

import torch
import torch.distributed as dist
from fsdp_model import IGNORE_INDEX, Llama3, ModelArgs, summed_loss
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class StageModel(nn.Module):
    """Some of a Llama's modules, called in the model's order."""

    def __init__(self, whole: Llama3, layers: range, first: bool, last: bool):
        super().__init__()
        self.tok_embeddings = whole.tok_embeddings if first else None
        self.layers = nn.ModuleDict({str(index): whole.layers[str(index)] for index in layers})
        self.norm = whole.norm if last else None
        self.output = whole.output if last else None
        self.register_buffer("rope", whole.rope, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            x = layer(x, self.rope)
        return self.output(self.norm(x)) if self.output is not None else x


class Stage(PipelineStage):
    """Skips the messages to itself in the exchange that opens connections: gloo has none, and a V puts neighboring stages on one rank."""

    def _get_init_p2p_neighbors_ops(self):
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


def layers_of_stages(num_layers: int, stages: int) -> list[range]:
    """TorchTitan's rule: embedding and head each count as a layer."""
    share, rest = divmod(num_layers + 2, stages)
    counts = [share + (stage < rest) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for count, end in zip(counts, ends)]


def stages_of_rank(schedule: str, rank: int, ranks: int, stages: int) -> list[int]:
    if schedule in V_SHAPED:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, ranks))


class PipelineTrainer:
    """One optimizer step. The loss is divided by the token count before the backward, and the gradient norm covers all stages."""

    def __init__(self, args: ModelArgs, schedule: str, rank: int, ranks: int, micro_batches: int, max_norm: float = 1.0):
        schedule_class = get_schedule_class(schedule)
        single = issubclass(schedule_class, PipelineScheduleSingle)
        num_stages = ranks if single else 2 * ranks
        self.rank, self.ranks, self.max_norm = rank, ranks, max_norm
        self.indices = stages_of_rank(schedule, rank, ranks, num_stages)
        self.models = self.build(args, num_stages)
        stages = [
            Stage(model, index, num_stages, torch.device("cpu")) for model, index in zip(self.models, self.indices)
        ]
        self.has_first, self.has_last = 0 in self.indices, num_stages - 1 in self.indices
        self.count = 1
        self.schedule = schedule_class(
            stages[0] if single else stages, micro_batches, loss_fn=lambda logits, labels: summed_loss(logits, labels) / self.count, scale_grads=False
        )
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=8e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)

    def build(self, args: ModelArgs, num_stages: int) -> list[StageModel]:
        layers = layers_of_stages(args.n_layers, num_stages)
        models = []
        for index in self.indices:
            with torch.device("meta"):
                whole = Llama3(args)
                model = StageModel(whole, layers[index], index == 0, index == num_stages - 1)
            model.to_empty(device="cpu")
            with torch.no_grad():
                for parameter in model.parameters():
                    nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
            whole.set_rope()
            model.rope = whole.rope.to("cpu")
            models.append(model)
        return models

    def step(self, input_BS: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss and the gradient norm over all ranks."""
        self.optimizer.zero_grad()
        self.count = int((labels_BS != IGNORE_INDEX).sum())
        losses: list[Tensor] = []
        inputs = (input_BS,) if self.has_first else ()
        extra = {"target": labels_BS, "losses": losses} if self.has_last else {}
        self.schedule.step(*inputs, **extra, return_outputs=False)
        norm = self.clip()
        self.optimizer.step()
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        dist.all_reduce(loss)
        return loss, norm

    @torch.no_grad()
    def clip(self) -> Tensor:
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        squares = nn.utils.get_total_norm([parameter.grad for parameter in parameters]) ** 2
        dist.all_reduce(squares)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)
        return norm
