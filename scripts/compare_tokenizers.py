#!/usr/bin/env python3
"""Compares LibTitan's tokenizer with Hugging Face's `tokenizers`: ids, decoded text, and speed on one thread, in the same run.

    .venv/bin/python scripts/compare_tokenizers.py --bench build/bin/tokenizer_bench [--megabytes 10] [--min-speedup 2]

Generates mixed text (code, accents, CJK, emoji, damaged UTF-8, long runs of spaces, special tokens, random code points). Both
sides tokenize it with the repository's tokenizer, with a 32,000-token tokenizer trained on that text, and with small tokenizers that
exercise the other pre-tokenizers. Stops at the first difference. Prints a JSON object; exit status 1 if something differs or
if LibTitan is less than --min-speedup times as fast. Installs `tokenizers` into this environment if it is missing.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if importlib.util.find_spec("tokenizers") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "tokenizers"], check=True)

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# --- text -------------------------------------------------------------------------------------------------------------

WORDS = (
    "the of training model and gradient don't it's WE'LL I'VE naïve café façade Ærøskøbing straße Größe señor coração "
    "Příliš žluťoučký kůň Ελλάδα данные обучение модель مرحبا بالعالم שלום नमस्ते दुनिया ไทย 한국어 데이터 가나다 e\u0301clair "
    "Å\u030angstro\u0308m \u017ft 'ſ K İstanbul ǅ ﬁligree 𝔘𝔫𝔦 ½ Ⅷ ٣٤ 12345678 3.14159 1e-5 0x7fff"
).split(" ")
CJK = "训练大型语言模型需要很多数据。人工智能、学習モデルを訓練する。データの並列化、テンソル並列「東京」漢字かなカナ"
EMOJI = ["😀", "👍🏽", "👩‍👩‍👧‍👦", "🇩🇪", "🏳️‍🌈", "❤️", "🤖", "1️⃣", "🧑🏿‍🚀", "\U0001fae8"]
SPACES = [" " * 7, " " * 100, "\t" * 9, "\n\n\n", "\r\n\r\n", " \n \n", "\u00a0\u2003\u3000", "\u0085", "\u2028", "\u180e", " \t \t", "\x0b\x0c"]
SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|begin_of", "<|", "<|end_of_text|>\n<|begin_of_text|>"]


def code_texts() -> list[bytes]:
    """Some of LibTorch's headers, or this repository's sources if torch isn't installed as a package."""
    torch = importlib.util.find_spec("torch")
    paths = sorted((pathlib.Path(torch.origin).parent / "include").rglob("*.h"))[::17] if torch else []
    return [path.read_bytes() for path in paths or sorted(REPOSITORY.glob("src/**/*.cpp"))]


def prose(rng: random.Random) -> bytes:
    return " ".join(rng.choice(WORDS) + rng.choice(["", "", "", ",", ".", "?!", "\n"]) for _ in range(400)).encode()


def ideographs(rng: random.Random) -> bytes:
    return "".join(rng.choice(CJK) for _ in range(rng.choice([10, 400, 3000]))).encode()


def pictures(rng: random.Random) -> bytes:
    return "".join(rng.choice(EMOJI) + rng.choice(["", " ", "ok"]) for _ in range(200)).encode()


def spaces(rng: random.Random) -> bytes:
    parts = [rng.choice(SPACES) * rng.choice([1, 1, 2, 50]) + rng.choice(["", "x", "return", "é", "7", ";"]) for _ in range(30)]
    return "".join(parts).encode()


def code_points(rng: random.Random) -> bytes:
    ranges = [(1, 0x7F), (0x80, 0x2FF), (0x300, 0x36F), (0x370, 0x1FFF), (0x2000, 0x2BFF), (0x3000, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(500)).encode()


def specials(rng: random.Random) -> bytes:
    return "".join(rng.choice(SPECIALS) + rng.choice(WORDS) + rng.choice(["", " "]) for _ in range(60)).encode()


def damaged(rng: random.Random, codes: list[bytes]) -> bytes:
    text = bytearray(rng.choice([prose(rng), ideographs(rng), pictures(rng), rng.choice(codes)[:3000]]))
    for _ in range(max(1, len(text) // 40)):
        at = rng.randrange(len(text))
        kind = rng.randrange(4)
        if kind == 0:
            text[at] = rng.randrange(256)
        elif kind == 1:
            del text[at]
            text = text or bytearray(b"x")
        elif kind == 2:
            text[at:at] = rng.choice([b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\xf0\x9f\x98", b"\xe2\x82", b"\xff", b"\xf8\x88"])
        else:
            text[at:at] = bytes(rng.randrange(128, 256) for _ in range(rng.randrange(1, 5)))
    return bytes(text)


def make_documents(size: int, seed: int) -> list[bytes]:
    """About `size` bytes, half of them code, as in a training mix: documents of up to about 100 kB, and one long run of spaces."""
    rng = random.Random(seed)
    codes = code_texts()
    makers = [prose, ideographs, pictures, spaces, code_points, specials, lambda r: damaged(r, codes)]
    documents, total = [b"", b" ", b"\n", b"a", b" " * 50_000, "字".encode() * 5_000, b"A" * 20_000], 95_000
    while total < size:
        document = rng.choice(codes) if total % 2 else rng.choice(makers)(rng)
        documents.append(document)
        total += len(document)
    return documents


# --- tokenizers -------------------------------------------------------------------------------------------------------

def trained(pre_tokenizer, texts, vocabulary, specials=("<|begin_of_text|>", "<|end_of_text|>"), **model) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def split(pattern, behavior="isolated", invert=False, **byte_level):
    byte_level = {"add_prefix_space": False, "use_regex": False} | byte_level
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, behavior=behavior, invert=invert), pre_tokenizers.ByteLevel(**byte_level)]
    )


def variants(texts: list[str]):
    """Small tokenizers, one for each kind of pre-tokenizer that LibTitan supports."""
    byte_level = pre_tokenizers.ByteLevel
    forms = {
        "gpt2": byte_level(add_prefix_space=False),
        "gpt2, prefix space": byte_level(add_prefix_space=True),
        "no regex": byte_level(add_prefix_space=False, use_regex=False),
        "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(add_prefix_space=False)]),
        "digits together": pre_tokenizers.Sequence([pre_tokenizers.Digits(), byte_level(add_prefix_space=False)]),
        "three splits": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), behavior="isolated"),
                pre_tokenizers.Split(Regex(r"[一-龥぀-ゟ゠-ヿ]+"), behavior="isolated"),
                pre_tokenizers.Split(Regex(DEEPSEEK3), behavior="isolated"),
                byte_level(add_prefix_space=False, use_regex=False),
            ]
        ),
        "words": split(Regex(r"\w+|[^\w\s]+|\s+$|^\s+|\s")),
        "empty matches": split(Regex(r"x*")),
        "prefix space after a split": split(" ", "isolated", add_prefix_space=True),
        "ignore_merges": split(Regex(LLAMA3)),
    }
    for behavior in ("removed", "merged_with_previous", "merged_with_next", "contiguous"):
        for invert in (False, True):
            forms[f"{behavior}{', inverted' * invert}"] = split(Regex(r"\p{P}|\s"), behavior, invert)
    for name, pre_tokenizer in forms.items():
        extra = {"ignore_merges": True} if name == "ignore_merges" else {}
        yield name, trained(pre_tokenizer, texts, 600, **extra)


def break_merges(path: pathlib.Path) -> None:
    """Reverses some merges, so that merging no longer produces some words of the vocabulary."""
    tree = json.loads(path.read_text())
    merges = tree["model"]["merges"]
    merges[10:40] = reversed(merges[10:40])
    path.write_text(json.dumps(tree))


# --- comparison -------------------------------------------------------------------------------------------------------

def write_documents(path: pathlib.Path, documents: list[bytes]) -> None:
    with path.open("wb") as out:
        for document in documents:
            out.write(struct.pack("<I", len(document)) + document)


def read_records(path: pathlib.Path, item_bytes: int) -> list[bytes]:
    data, records, at = path.read_bytes(), [], 0
    while at < len(data):
        (count,) = struct.unpack_from("<I", data, at)
        records.append(data[at + 4 : at + 4 + count * item_bytes])
        at += 4 + count * item_bytes
    return records


def difference(ours: list[int], theirs: list[int], text: str, tokenizer: Tokenizer) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    before = tokenizer.decode(theirs[:at], skip_special_tokens=False)
    return (
        f"token {at}: ours {ours[at:at + 5]} {tokenizer.decode(ours[at:at + 5])!r}, "
        f"theirs {theirs[at:at + 5]} {tokenizer.decode(theirs[at:at + 5])!r}, after {before[-20:]!r}"
    )


def timed(runs: int, body):
    """The result of `body`, and the median of its running times."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        result = body()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def compare(name: str, file: pathlib.Path, documents: list[bytes], bench: str, runs: int) -> dict:
    tokenizer = Tokenizer.from_file(str(file))
    texts = [document.decode("utf-8", errors="replace") for document in documents]
    with tempfile.TemporaryDirectory() as folder:
        source, ids_file, texts_file = (pathlib.Path(folder) / leaf for leaf in ("documents", "ids", "texts"))
        write_documents(source, documents)
        command = [bench, str(file), str(source), "--runs", str(runs), "--ids", str(ids_file), "--texts", str(texts_file)]
        ours = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        our_ids = [list(struct.unpack(f"<{len(r) // 4}i", r)) for r in read_records(ids_file, 4)]
        our_texts = read_records(texts_file, 1)
    encodings, encode_s = timed(runs, lambda: tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    their_ids = [encoding.ids for encoding in encodings]
    their_texts, decode_s = timed(runs, lambda: tokenizer.decode_batch(their_ids, skip_special_tokens=False))
    for i, text in enumerate(texts):
        if our_ids[i] != their_ids[i]:
            sys.exit(f"{name}: encoding document {i} differs at {difference(our_ids[i], their_ids[i], text, tokenizer)}")
        if our_texts[i] != their_texts[i].encode():
            sys.exit(f"{name}: decoding document {i} differs: ours {our_texts[i][:80]!r}, theirs {their_texts[i][:80]!r}")
    decoded = sum(len(text) for text in our_texts)
    theirs = {"encode_mb_per_s": ours["bytes"] / encode_s / 1e6, "decode_mb_per_s": decoded / decode_s / 1e6}
    return {
        "tokenizer": name,
        "bytes": ours["bytes"],
        "tokens": ours["tokens"],
        "ours": {key: round(ours[key], 1) for key in theirs},
        "tokenizers": {key: round(value, 1) for key, value in theirs.items()},
        "speedup": {key.split("_")[0]: round(ours[key] / theirs[key], 1) for key in theirs},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", required=True, help="the tokenizer_bench program")
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--runs", type=int, default=3, help="number of timed runs, of which the median is reported")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--min-speedup", type=float, default=0)
    args = parser.parse_args()

    documents = make_documents(int(args.megabytes * 1e6), args.seed)
    sample = [d.decode("utf-8", errors="replace") for d in documents[:200]]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "tokenizer.json"
        for name, tokenizer in variants(sample):
            tokenizer.save(str(file))
            if name == "ignore_merges":
                break_merges(file)
            compare(name, file, documents[:90], args.bench, 1)
        results.append(compare("assets/tokenizer", REPOSITORY / "assets/tokenizer/tokenizer.json", documents, args.bench, args.runs))
        texts = [d.decode("utf-8", errors="replace") for d in documents]
        trained(split(Regex(LLAMA3)), texts[: len(texts) // 2], 32_000).save(str(file))
        results.append(compare("32,000 tokens", file, documents, args.bench, args.runs))
    print(json.dumps({"equal": True, "threads": 1, "results": results}, indent=2))
    slowest = min(speed for result in results for speed in result["speedup"].values())
    if slowest < args.min_speedup:
        sys.exit(f"only {slowest} times as fast as `tokenizers`; at least {args.min_speedup} expected")


if __name__ == "__main__":
    main()
