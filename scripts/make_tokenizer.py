#!/usr/bin/env python3
"""Trains the small tokenizer of configs/llama3_debug.toml: assets/tokenizer/{tokenizer,tokenizer_config}.json.

A byte-level BPE of 2,048 tokens, specials included, with Llama 3's split pattern, trained on the C++ headers that ship with
LibTorch. Needs the `tokenizers` package. The repository contains the result, so training doesn't need this script.

    .venv/bin/python scripts/make_tokenizer.py [--headers FOLDER] [--output FOLDER]
"""

import argparse
import importlib.util
import json
import pathlib

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 2048
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def torch_headers() -> pathlib.Path:
    """The include folder of the installed torch, found without importing it."""
    return pathlib.Path(importlib.util.find_spec("torch").origin).parent / "include"


def header_texts(folder: pathlib.Path):
    for path in sorted(p for p in folder.rglob("*") if p.suffix in {".h", ".hpp", ".cuh"}):
        yield path.read_text(encoding="utf-8", errors="replace")


def train(texts, vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([BOS, EOS])
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, bos_id)]
    )
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--headers", type=pathlib.Path, default=None, help="default: the installed torch's include folder")
    default_output = pathlib.Path(__file__).resolve().parent.parent / "assets" / "tokenizer"
    parser.add_argument("--output", type=pathlib.Path, default=default_output)
    args = parser.parse_args()

    tokenizer = train(header_texts(args.headers or torch_headers()), VOCABULARY)
    assert tokenizer.get_vocab_size() == VOCABULARY, tokenizer.get_vocab_size()
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.output / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (args.output / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{args.output}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
