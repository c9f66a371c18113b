#!/usr/bin/env python3
"""Trains a Llama in bf16 or, with torchao, in Float8, on one GPU or (emulated) on a CPU, and prints one JSON object for scripts/float8_table.py.

    .venv/bin/python benchmarks/pytorch/float8_train.py --args '{"dim": 2048, ...}' --recipe rowwise --compile --device cuda --seq-len 8192

--args takes the ModelArgs of scripts/reference/llama3.py. --recipe: bf16, tensorwise, rowwise, rowwise_with_gw_hp. --compile compiles
each block and the loss, as TorchTitan does. The host waits for the device only after the last step, as TorchTitan's does until a step that it logs. Keys: tokens_per_s (in the
median step after the warm-up), peak_memory_gib (reserved by the allocator; on a CPU the process's peak), loss (of each step),
linears (number of layers in Float8).
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import tempfile
import time


def convert_to(recipe: str, compiles: bool, counts: dict, **settings):
    """A function that converts a model. `settings`: fields of torchao's Float8LinearConfig that differ from the recipe's."""

    def convert(model) -> None:
        import dataclasses

        import torch
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        if recipe != "bf16":
            config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), **settings)
            fits = lambda module, name: isinstance(module, torch.nn.Linear) and name != "output" and not any(n % 16 for n in module.weight.shape)  # noqa: E731
            convert_to_float8_training(model, config=config, module_filter_fn=fits)
            counts["linears"] = sum(isinstance(module, Float8Linear) for module in model.modules())
        if compiles:
            for layer in model.layers.values():
                layer.compile(fullgraph=True)

    return convert


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--args", type=json.loads, required=True)
    parser.add_argument("--recipe", choices=("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"), default="bf16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--local-batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_args()

    from fsdp_model import ModelArgs, Trainer, build_model, init_ranks, summed_loss

    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    args = ModelArgs(**options.args, max_seq_len=options.seq_len)
    counts = {"linears": 0}
    on_gpu = options.device == "cuda"

    def now():
        """The time on a CPU, or an event that gets the device's time when the device is there."""
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    with tempfile.TemporaryDirectory() as folder:
        mesh = init_ranks(0, 1, os.path.join(folder, "store"), options.device)
        model = build_model(args, mesh, "bf16", convert_to(options.recipe, options.compile, counts, emulate=not on_gpu))
        trainer = Trainer(model, loss=torch.compile(summed_loss) if options.compile else summed_loss)
        # All batches go to the device first: a copy from pageable memory waits for the steps before it.
        shape = (options.warmup + options.steps, options.local_batch_size, options.seq_len + 1)
        batches = torch.randint(args.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(options.device)
        times, losses = [now()], []
        for tokens in batches:
            loss, _ = trainer.step(tokens[:, :-1], tokens[:, 1:])
            times.append(now())
            losses.append(loss)
        losses = [loss.item() for loss in losses]  # waits for the device
        step_s = [begin.elapsed_time(end) / 1000 if on_gpu else end - begin for begin, end in itertools.pairwise(times)]
        dist.destroy_process_group()
    peak = torch.cuda.max_memory_reserved() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tokens_per_s = options.local_batch_size * options.seq_len / statistics.median(step_s[options.warmup :])
    print(json.dumps({"tokens_per_s": tokens_per_s, "peak_memory_gib": peak / 2**30, "loss": losses, **counts}))
    os._exit(0)


if __name__ == "__main__":
    main()
