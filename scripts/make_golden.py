#!/usr/bin/env python3
"""Makes tests/data/golden: PyTorch's results for small inputs, for the unit tests of nn and optim.

    .venv/bin/python scripts/make_golden.py

Inputs are drawn in fp32 and widened, so both precisions use the same numbers. tests/data/golden/README.md describes the
files.
"""

import json
import pathlib
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "scripts/reference"))

from llama3 import (  # noqa: E402
    IGNORE_INDEX,
    Attention,
    FeedForward,
    ModelArgs,
    RopeScaling,
    lr_factor,
    rope_frequencies,
    rope_table,
    rotate,
    summed_loss,
)
from safetensors_file import save  # noqa: E402

FOLDER = REPOSITORY / "tests/data/golden"
PRECISIONS = {"f32": torch.float32, "f64": torch.float64}
ARGS = ModelArgs(dim=32, n_heads=4, n_kv_heads=2, multiple_of=16, max_seq_len=12)
Tensors = dict[str, Tensor]


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def differentiated(function, inputs: Tensors, grad_output: Tensor | None = None) -> Tensors:
    """`inputs`, the output, and the gradient of each floating-point input. `grad_output` is the output's gradient; without it the output is a scalar."""
    leaves = {n: t.clone().requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}
    output = function(**leaves)
    output.backward(grad_output)
    result = dict(inputs) | {"output": output.detach()}
    if grad_output is not None:
        result["grad_output"] = grad_output
    return result | {f"grad_{name}": leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}


def of_module(module: nn.Module, call, input: Tensor, grad_output: Tensor) -> Tensors:
    """`differentiated` for a module's input and parameters."""
    names = {name.replace(".weight", ""): name for name, _ in module.named_parameters()}

    def function(input: Tensor, **weights: Tensor) -> Tensor:
        return call(lambda *args: torch.func.functional_call(module, {names[n]: w for n, w in weights.items()}, args), input)

    weights = {
        short: 0.2 * draw(100 + i, *module.get_parameter(name).shape).to(input.dtype)
        for i, (short, name) in enumerate(names.items())
    }
    return differentiated(function, {"input": input} | weights, grad_output)


def rope(dtype: torch.dtype) -> Tensors:
    table = rope_table(ARGS, dtype)
    tensors = {
        "frequency.plain": rope_frequencies(128, 500000.0, None, dtype),
        "frequency.scaled": rope_frequencies(128, 500000.0, RopeScaling(), dtype),
        "table.cos": table.real.contiguous(),
        "table.sin": table.imag.contiguous(),
    }
    input, grad_output = draw(1, 2, 9, 4, ARGS.head_dim).to(dtype), draw(2, 2, 9, 4, ARGS.head_dim).to(dtype)
    return tensors | prefixed("rotate", differentiated(lambda input: rotate(input, table), {"input": input}, grad_output))


def rms_norm(dtype: torch.dtype) -> Tensors:
    inputs = {"input": draw(3, 3, 5, 24).to(dtype), "weight": draw(4, 24).to(dtype)}
    return differentiated(lambda input, weight: F.rms_norm(input, (24,), weight, 1e-5), inputs, draw(5, 3, 5, 24).to(dtype))


def attention(dtype: torch.dtype) -> Tensors:
    table = rope_table(ARGS, dtype)
    return of_module(
        Attention(ARGS), lambda module, x: module(x, table), draw(6, 2, 7, ARGS.dim).to(dtype), draw(7, 2, 7, ARGS.dim).to(dtype)
    )


def feed_forward(dtype: torch.dtype) -> Tensors:
    return of_module(
        FeedForward(ARGS), lambda module, x: module(x), draw(8, 2, 7, ARGS.dim).to(dtype), draw(9, 2, 7, ARGS.dim).to(dtype)
    )


def embedding(dtype: torch.dtype) -> Tensors:
    tokens = torch.tensor([[3, 0, 3, 10], [3, 7, 10, 0]])
    inputs = {"tokens": tokens, "weight": draw(10, 11, 6).to(dtype)}
    return differentiated(lambda tokens, weight: F.embedding(tokens, weight), inputs, draw(11, 2, 4, 6).to(dtype))


def cross_entropy(dtype: torch.dtype) -> Tensors:
    """The loss head: logits = hidden weight^T, then the summed loss of valid labels divided by `count`. `count` is larger than
    their number, as if other ranks had labels too."""
    labels = torch.tensor([[5, IGNORE_INDEX, 36, 0, 5, IGNORE_INDEX], [IGNORE_INDEX, 11, 12, 30, 2, 2]])
    count = 13

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return summed_loss(hidden @ weight.T, labels) / count

    inputs = {"hidden": draw(12, 2, 6, 16).to(dtype), "weight": draw(13, 37, 16).to(dtype), "labels": labels}
    tensors = differentiated(loss, inputs)
    return tensors | {"logits": inputs["hidden"] @ inputs["weight"].T, "count": torch.tensor(count)}


SHAPES = ((5, 7), (9,))
OPTIMIZER_STEPS = 5
OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
IMPLEMENTATIONS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}


def stepped(kind: type, options: dict, dtype: torch.dtype) -> Tensors:
    parameters = [nn.Parameter(draw(20 + i, *shape).to(dtype)) for i, shape in enumerate(SHAPES)]
    optimizer = kind(parameters, lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **options)
    tensors = {}
    for step in range(OPTIMIZER_STEPS):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - 0.1 * step)
        for i, parameter in enumerate(parameters):
            parameter.grad = gradient(step, i, dtype)
        optimizer.step()
        tensors |= {f"step{step + 1}.p{i}": p.detach().clone() for i, p in enumerate(parameters)}
    for i, parameter in enumerate(parameters):
        state = optimizer.state[parameter]
        tensors |= {f"exp_avg.p{i}": state["exp_avg"], f"exp_avg_sq.p{i}": state["exp_avg_sq"]}
    return tensors


def gradient(step: int, index: int, dtype: torch.dtype) -> Tensor:
    return draw(30 + 10 * step + index, *SHAPES[index]).to(dtype)


def optimizers(dtype: torch.dtype) -> Tensors:
    tensors = {f"initial.p{i}": draw(20 + i, *shape).to(dtype) for i, shape in enumerate(SHAPES)}
    tensors |= {f"grad{s + 1}.p{i}": gradient(s, i, dtype) for s in range(OPTIMIZER_STEPS) for i in range(len(SHAPES))}
    for name, kind in OPTIMIZERS.items():
        for implementation, options in IMPLEMENTATIONS.items():
            tensors |= prefixed(f"{name}.{implementation}", stepped(kind, options, dtype))
    return tensors


def clipping(dtype: torch.dtype) -> Tensors:
    tensors = {f"grad.p{i}": gradient(0, i, dtype) for i in range(len(SHAPES))}
    for name, max_norm in {"above": 1.0, "below": 100.0}.items():
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
        for i, parameter in enumerate(parameters):
            parameter.grad = gradient(0, i, dtype)
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        tensors |= {f"{name}.max_norm": torch.tensor(max_norm, dtype=dtype), f"{name}.norm": norm}
        tensors |= {f"{name}.p{i}": parameter.grad for i, parameter in enumerate(parameters)}
    return tensors


def lr_schedules() -> list[dict]:
    cases = [
        {"steps": steps, "warmup_steps": warmup, "decay_ratio": ratio, "decay_type": kind, "min_lr_factor": floor}
        for steps, warmup in ((10, 2), (7, 0), (5, 9), (40, 4))
        for ratio in (None, 0.5, 0.8, 1.0)
        for kind in ("linear", "sqrt", "cosine")
        for floor in (0.0, 0.1)
    ]
    return [
        case | {"factors": [lr_factor(step, *case.values()) for step in range(case["steps"])]} for case in cases
    ]


SUBJECTS = {
    "rope": rope,
    "rms_norm": rms_norm,
    "attention": attention,
    "feed_forward": feed_forward,
    "embedding": embedding,
    "cross_entropy": cross_entropy,
    "optimizers": optimizers,
    "clipping": clipping,
}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # one order of summation
    for name, subject in SUBJECTS.items():
        tensors: Tensors = {}
        for precision, dtype in PRECISIONS.items():
            tensors |= prefixed(precision, subject(dtype))
        save(FOLDER / f"{name}.safetensors", tensors)
    (FOLDER / "lr_schedules.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in lr_schedules()) + "\n]\n")
    script = REPOSITORY / "scripts/reference/gradients.py"
    run, output = REPOSITORY / "tests/data/parity/mini", FOLDER / "mini_grads.safetensors"
    subprocess.run([sys.executable, script, run, output], check=True)


if __name__ == "__main__":
    main()
