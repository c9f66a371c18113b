#!/usr/bin/env python3
"""Makes tests/data/golden/documents.json: the losses and gradient norms of tests/data/parity/mini with attention within documents.

    .venv/bin/python scripts/make_document_golden.py

PyTorch computes in float64 with the mask that TorchTitan makes for attn_mask_type = "block_causal". Its flex_attention has no
backward on a CPU, so the same mask goes to scaled_dot_product_attention, and flex_attention checks the first forward.
"""

import json
import pathlib
import sys

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask, flex_attention

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "scripts/reference"))

import llama3  # noqa: E402
from recorded_run import loss_of, read_run  # noqa: E402

RUN = REPOSITORY / "tests/data/parity/mini"
EOS_ID = 0  # the most frequent token: about four documents in a row of 64 tokens


def causal(b, h, q, k):
    return q >= k


def same_document(tokens_BS: Tensor):
    """TorchTitan's get_document_mask_mod: a document's number is the number of EOS tokens before the token."""
    is_eos_BS = (tokens_BS == EOS_ID).int()
    number_BS = is_eos_BS.cumsum(1) - is_eos_BS
    return lambda b, h, q, k: number_BS[b, q] == number_BS[b, k]


def mask_of(tokens_BS: Tensor, make):
    rows, length = tokens_BS.shape
    return make(and_masks(causal, same_document(tokens_BS)), rows, None, length, length, device="cpu")


def flex_logits(model: llama3.Llama3, tokens_BS: Tensor) -> Tensor:
    block_mask = mask_of(tokens_BS, create_block_mask)

    def attend(q, k, v, attn_mask, is_causal, enable_gqa):
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa)

    plain, llama3.F.scaled_dot_product_attention = llama3.F.scaled_dot_product_attention, attend
    try:
        with torch.no_grad():
            return model(tokens_BS)
    finally:
        llama3.F.scaled_dot_product_attention = plain


def main() -> None:
    torch.set_num_threads(1)
    run = read_run(RUN)
    model, settings = run.model(torch.float64), run.training
    with torch.no_grad():
        logits = model(run.input[0], mask_of(run.input[0], create_mask))
    torch.testing.assert_close(logits, flex_logits(model, run.input[0]), rtol=0, atol=1e-12)
    optimizer = torch.optim.AdamW(
        model.parameters(), settings["lr"], settings["betas"], settings["eps"], settings["weight_decay"], fused=True
    )
    steps, count = [], settings["steps"]
    for index in range(count):
        factor = llama3.lr_factor(
            index, count, settings["warmup_steps"], settings["decay_ratio"], settings["decay_type"], settings["min_lr_factor"]
        )
        optimizer.param_groups[0]["lr"] = settings["lr"] * factor
        tokens = run.input[index]
        loss = loss_of(model, tokens, run.labels[index], mask_of(tokens, create_mask))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_norm"])
        optimizer.step()
        steps.append({"step": index + 1, "loss": loss.item(), "grad_norm": norm.item(), "lr": settings["lr"] * factor})
    record = {"torch": torch.__version__, "eos_id": EOS_ID, "steps": steps}
    (REPOSITORY / "tests/data/golden/documents.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"losses {steps[0]['loss']:.6f} .. {steps[-1]['loss']:.6f}")


if __name__ == "__main__":
    main()
