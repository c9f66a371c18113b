#!/usr/bin/env python3
"""How far every layout's loss and gradients are from one rank's: runs composition_test and writes docs/numerics.md.

    scripts/numerics.py [--ranks 1,2,3,4] [--eight] [--all] [--print]

--eight adds 8 ranks, --all runs every combination instead of a cover of their pairs, --print writes to the terminal instead. Needs
build/bin/titan and build/bin/composition_test, and only Python's standard library.
"""

import argparse
import datetime
import json
import pathlib
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs/numerics.md"
PROGRAMS = REPOSITORY / "build/bin"

MODELS = {
    "mini": "Llama of 2 layers, 4 heads, 2 key heads, 256 tokens: TorchTitan's parity fixture",
    "odd_sizes": "a vocabulary of 251 and a feed-forward of 170, which 4 does not divide; 4 key heads, one per rank at 4 ranks",
    "tiny_vocabulary": "5 tokens: at 4 ranks one has none of them",
    "tiny_feed_forward": "a feed-forward of 5 features: at 4 ranks one has none of them",
    "tied": "embedding and output are one matrix",
    "thirds": "sizes for 3 ranks",
    "one_row": "a batch of one sequence of 8 tokens",
}
TOLERANCES = {"float64": "1e-10", "float32": "1e-5", "bfloat16": "2 x one rank's bfloat16"}
PRECISIONS = list(TOLERANCES)

HEAD = """# Numerics

Every product of data (replicated and sharded), context and tensor parallelism that fits a number of ranks, against the same model on one
rank: the loss, the gradient norm and every parameter's gradient, ‖g − ref‖ / ‖ref‖. Tensor parallelism runs in all its forms (with and without
sequence and loss parallelism, overlapped), all with and without activation checkpoints and accumulation: {selection}.
[composition_test](../tests/distributed/composition_test.cpp) fails beyond the tolerances; `scripts/numerics.py` runs it and wrote this
page on {date}, on a CPU (fp32 and bfloat16 differ a little from machine to machine).

In bfloat16 the reference is one rank's fp32: rounding alone is close to a percent there, and a layout may be twice as far away as one
rank's bfloat16 is. Its norm isn't compared.

"""


def run(ranks, every):
    command = [PROGRAMS / "titan", "launch", "-n", str(ranks), "--", PROGRAMS / "composition_test"] + (["--all"] if every else [])
    process = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=3600)
    if process.returncode != 0:
        sys.exit(f"{ranks} ranks: composition_test failed\n{process.stdout[-4000:]}{process.stderr[-4000:]}")
    lines = [line[line.find("{"):] for line in process.stdout.splitlines() if '{"composition"' in line]
    return [json.loads(line) for line in lines]


def order(result):
    names = list(MODELS)
    model = result["composition"]
    return PRECISIONS.index(result["precision"]), names.index(model) if model in names else len(names), model, result["ranks"]


def table(results):
    lines = ["| precision | model | ranks | layouts | loss | gradient norm | worst gradient | of parameter | tolerance |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for result in sorted(results, key=order):
        norm_text = "-" if result["precision"] == "bfloat16" else f"{result['norm']:.1e}"
        lines.append("| {precision} | {composition} | {ranks} | {layouts} | {loss:.1e} | {norm_text} | {gradient:.1e} | {parameter} | "
                     "{tolerance} |".format(**result, norm_text=norm_text, tolerance=TOLERANCES[result["precision"]]))
    return "\n".join(lines)


def page(results, every):
    head = HEAD.format(selection="every combination of these" if every else "as many combinations as it takes for\nevery two settings to meet; the nightly tests run all",
                       date=datetime.date.today().isoformat())
    models = "\n".join(f"- `{name}`: {what}" for name, what in MODELS.items())
    return f"{head}{table(results)}\n\nThe models:\n\n{models}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,3,4")
    parser.add_argument("--eight", action="store_true", help="8 ranks too")
    parser.add_argument("--all", action="store_true", help="every combination")
    parser.add_argument("--print", action="store_true", help="to the terminal")
    arguments = parser.parse_args()
    ranks = [int(word) for word in arguments.ranks.split(",")] + ([8] if arguments.eight else [])
    text = page([result for count in ranks for result in run(count, arguments.all) if result["layouts"] > 0], arguments.all)
    if arguments.print:
        print(text)
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
