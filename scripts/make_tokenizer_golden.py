#!/usr/bin/env python3
"""Writes tests/unit/data/tokenizer_golden.json: short texts, and their ids from the `tokenizers` package with
assets/tokenizer. scripts/compare_tokenizers.py compares far more text, but needs the package.

    .venv/bin/python scripts/make_tokenizer_golden.py
"""

import json
import pathlib

from tokenizers import Tokenizer

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
TEXTS = [
    "",
    " ",
    "template <class T>\nstruct Node {\n  T value;\n  Node* next = nullptr;  // owned by the list\n};\n",
    "#include <ATen/core/Tensor.h>\r\n\r\n\tat::Tensor x = at::empty({2, 3});",
    "for (int64_t i = 0; i < 1234567; ++i)      sum += 3.14159e-5f * x[i];",
    "It's WE'LL they'Ve I'm don't 'ſ",
    "naïve café, e\u0301clair, Ærøskøbing, Ελλάδα, данные, שלום, नमस्ते, ไทย, 한국어",
    "训练大型语言模型需要很多数据。学習モデルを訓練する「東京」",
    "😀👍🏽👩‍👩‍👧‍👦🇩🇪 ❤️ \U0001fae8 𝔘𝔫𝔦",
    "a" + " " * 100 + "b" + "\t" * 20 + "\n\n \n \r\n" + "\u00a0\u2003\u3000\u0085\u2028\u180e" + "  ",
    "½ Ⅷ ٣٤ 0x7fff 12345678",
    "<|begin_of_text|>int main() {}<|end_of_text|><|begin_of_text|",
    "x" * 300 + "\ufffd\x00\x7f",
]


def main() -> None:
    tokenizer = Tokenizer.from_file(str(REPOSITORY / "assets/tokenizer/tokenizer.json"))
    samples = [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False).ids} for text in TEXTS]
    output = REPOSITORY / "tests/unit/data/tokenizer_golden.json"
    output.write_text("[\n" + ",\n".join(json.dumps(sample) for sample in samples) + "\n]\n")


if __name__ == "__main__":
    main()
