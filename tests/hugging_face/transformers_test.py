#!/usr/bin/env python3
"""Logits of the same weights here and in transformers, fp32: written here and read there, and the other way round.

    .venv/bin/python tests/hugging_face/transformers_test.py build/bin/titan build/bin/hf_logits

scripts/check_transformers.sh installs what this needs and runs it. Exit status 1 when logits are further apart than LIMIT.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

LIMIT = 1e-5
SOURCE = pathlib.Path(__file__).resolve().parent.parent.parent
MINI = SOURCE / "tests/data/parity/mini"
DEBUG = SOURCE / "configs/llama3_debug.toml"
DEBUG_SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 2048, "num_attention_heads": 16}
LLAMA_3_1 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def tokens(vocabulary: int) -> torch.Tensor:
    """The same tokens as in hf_logits.cpp."""
    return (7919 * torch.arange(2)[:, None] + 10473 * torch.arange(64)[None, :] + 1) % vocabulary


def theirs(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens(model.config.vocab_size)).logits


class Titan:
    def __init__(self, options: argparse.Namespace, folder: pathlib.Path):
        self.options, self.folder = options, folder

    def convert(self, source: pathlib.Path, target: pathlib.Path, *words: str) -> pathlib.Path:
        subprocess.run([self.options.titan, "checkpoint", "convert", source, target, *words], check=True, stdout=subprocess.DEVNULL)
        return target

    def logits(self, config_folder: pathlib.Path, weights: pathlib.Path) -> torch.Tensor:
        output = self.folder / "logits.safetensors"
        subprocess.run([self.options.hf_logits, config_folder, weights, output], check=True)
        return load_file(output)["logits"]


def difference(name: str, ours: torch.Tensor, others: torch.Tensor) -> bool:
    """Prints the difference; true if it is too large."""
    worst = (ours - others).abs().max().item()
    failed = not worst <= LIMIT or ours.std().item() < 0.1
    print(f"{name:40} {worst:.2e}  limit {LIMIT:.0e}  std of the logits {ours.std().item():.2f}  {'TOO LARGE' if failed else 'ok'}")
    return failed


def written_here(titan: Titan, shard_gb: str) -> bool:
    weights = MINI / "titan.safetensors"
    folder = titan.convert(weights, titan.folder / f"written_{shard_gb}", "--config", str(MINI / "replay.toml"), "--shard-gb", shard_gb)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return difference(f"written here, files of {shard_gb} GB", titan.logits(folder, weights), theirs(model))


def debug_model(titan: Titan) -> bool:
    """The debug config's model, as a run writes it at its end."""
    words = ["--job.dump_folder", titan.folder / "run", "--training.steps", "1", "--training.seq_len", "64", "--training.local_batch_size", "1",
             "--training.device", "cpu", "--checkpoint.enable", "--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"]  # fmt: skip
    subprocess.run([titan.options.titan, "train", DEBUG, *words], check=True, cwd=SOURCE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = titan.folder / "run/checkpoint/step-1"
    weights = titan.convert(folder, titan.folder / "debug.safetensors")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return difference("written here, by a run of the debug config", titan.logits(folder, weights), theirs(model))


def written_there(titan: Titan, name: str, **settings) -> bool:
    torch.manual_seed(1)
    sizes = {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3, "vocab_size": 300, "num_attention_heads": 6}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, "initializer_range": 0.05, "max_position_embeddings": 256, **settings}))
    folder = titan.folder / name.replace(" ", "_")
    model.save_pretrained(folder, max_shard_size="200KB")
    weights = titan.convert(folder, titan.folder / f"{folder.name}.safetensors")
    return difference(f"written there, {name}", titan.logits(folder, weights), theirs(model))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("titan", type=pathlib.Path)
    parser.add_argument("hf_logits", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        titan = Titan(options, pathlib.Path(folder))
        failed = [
            written_here(titan, "5"),
            written_here(titan, "0.0001"),
            debug_model(titan),
            written_there(titan, "plain", rms_norm_eps=1e-5),
            written_there(titan, "debug model", **DEBUG_SIZES, initializer_range=0.03),
            written_there(titan, "grouped and tied", num_key_value_heads=2, tie_word_embeddings=True),
            written_there(titan, "stretched", num_key_value_heads=3, rope_parameters={**LLAMA_3_1, "rope_theta": 500000.0}),
        ]
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
