#!/usr/bin/env python3
"""Checks the plain PyTorch model against TorchTitan's recorded runs: first logits, first gradient norms, 20 losses.

    .venv/bin/python scripts/reference/check_parity.py [tests/data/parity/mini tests/data/parity/mini8]

Prints the largest difference of each kind; exit status 1 if one exceeds its limit.
"""

import argparse
import pathlib
import sys

import torch
from llama3 import Llama3, lr_factor
from recorded_run import RecordedRun, loss_of, read_run

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
DEFAULT_RUNS = [REPOSITORY / "tests/data/parity" / name for name in ("mini", "mini8")]
LIMITS = {"first_logits": 1e-5, "loss": 5e-6, "grad_norm": 1e-4, "first_grad_norms": 1e-5, "lr": 1e-9}


def difference(ours, theirs) -> float:
    return (torch.as_tensor(ours, dtype=torch.float64) - torch.as_tensor(theirs, dtype=torch.float64)).abs().max().item()


def relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / theirs


def check_logits(run: RecordedRun, model: Llama3) -> float:
    with torch.no_grad():
        logits = model(run.input[0])
    record = run.record["first_logits"]
    count = len(record["row0_position0"])
    return max(
        difference(logits[0, 0, :count], record["row0_position0"]),
        difference(logits[-1, -1, :count], record["last_row_last_position"]),
        difference(logits.mean(), record["mean"]),
        difference(logits.std(), record["std"]),
    )


def train(run: RecordedRun, model: Llama3) -> dict[str, float]:
    """Replays the run and returns the largest difference of each kind."""
    settings, steps = run.training, run.record["steps"]
    optimizer = torch.optim.AdamW(
        model.parameters(), settings["lr"], settings["betas"], settings["eps"], settings["weight_decay"], fused=True
    )
    worst = dict.fromkeys(LIMITS, 0.0)

    def note(kind: str, value: float) -> None:
        worst[kind] = max(worst[kind], value)

    for index, theirs in enumerate(steps):
        factor = lr_factor(
            index, len(steps), settings["warmup_steps"], settings["decay_ratio"], settings["decay_type"], settings["min_lr_factor"]
        )
        optimizer.param_groups[0]["lr"] = settings["lr"] * factor
        loss = loss_of(model, run.input[index], run.labels[index])
        optimizer.zero_grad()
        loss.backward()
        norms = {name: parameter.grad.double().norm().item() for name, parameter in model.named_parameters()}
        if index == 0:
            for name, norm in run.record["first_grad_norms"].items():
                note("first_grad_norms", relative(norms[name], norm))
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_norm"])
        optimizer.step()
        note("loss", difference(loss.item(), theirs["loss"]))
        note("grad_norm", relative(total.item(), theirs["grad_norm"]))
        note("lr", difference(settings["lr"] * factor, theirs["lr"]))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=pathlib.Path, default=DEFAULT_RUNS)
    failed = False
    for folder in parser.parse_args().runs:
        run = read_run(folder)
        model = run.model(torch.float32)
        first_logits = check_logits(run, model)
        worst = train(run, model) | {"first_logits": first_logits}
        for kind, value in worst.items():
            ok = value <= LIMITS[kind]
            failed |= not ok
            print(f"{folder.name:6} {kind:17} {value:9.2e}  limit {LIMITS[kind]:.0e}  {'ok' if ok else 'TOO LARGE'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
