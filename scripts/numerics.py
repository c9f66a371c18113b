#!/usr/bin/env python3
"""Measures how far every layout's loss and gradients are from those of one rank: runs composition_test and pipeline_test,
and writes docs/numerics.md.

    scripts/numerics.py [--ranks 1,2,3,4] [--eight] [--all [TESTS]] [--read FILE]... [--print]

--eight adds 8 ranks. --all runs what the nightly tests run (for composition, pipeline or both) instead of only covering all pairs of settings. --read takes the tests' output from
files instead of running them. --print writes to the terminal instead. Needs build/bin/titan and build/bin/distributed_tests, and only Python's standard library.
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
    "mini": "a Llama with 2 layers, 4 heads, 2 key heads and 256 tokens: TorchTitan's parity fixture",
    "odd_sizes": "a vocabulary of 251 and a feed-forward of 170, which 4 does not divide; 4 key heads, one per rank with 4 ranks",
    "tiny_vocabulary": "5 tokens, so one of 4 ranks has none; 4 tokens for 3 ranks",
    "tiny_feed_forward": "a feed-forward of 5 features, so one of 4 ranks has none; 4 features for 3 ranks",
    "tied": "embedding and output share one matrix",
    "one_row": "a batch of one sequence of 8 tokens; 6 tokens for 3 ranks",
}
PIPELINE_MODELS = {
    "pipelined": "a Llama with 7 layers, 4 heads and key heads, 32 features and 16 tokens",
    "shallow": "the same with 2 layers and a vocabulary of 251: most stages have one layer or none",
    "tied": "the same with 7 layers, and one matrix for embedding and output, on the first and the last stage",
}
SIZES = {"composition": " (for 3 ranks they have 6 heads, 3 key heads, width 48, and batches of 6 sequences of 12 tokens)"}
TESTS = {"composition": MODELS, "pipeline": PIPELINE_MODELS}
TOLERANCES = {"float64": "1e-10", "float32": "1e-5", "bfloat16": "2 × one rank's bfloat16"}
PRECISIONS = list(TOLERANCES)

HEAD = """# Numerics

Every layout gives the same results as one rank, within rounding. This page says how closely: it compares the loss, the gradient norm and every parameter's
gradient, ‖g − ref‖ / ‖ref‖, with the same model on one rank. The layouts are all combinations of data (replicated and sharded), context and tensor parallelism that fit a number of
ranks. Tensor parallelism runs in all its forms (with and without sequence and loss parallelism, and asynchronous), and everything runs with and without activation
checkpointing and accumulation. {selection}.
[composition_test](../tests/distributed/composition_test.cpp) fails if a difference exceeds its tolerance. `scripts/numerics.py` runs it, and wrote this
page on {date}, on a CPU (fp32 and bfloat16 results differ a little between machines).

In bfloat16 the reference is one rank in fp32. Rounding alone makes a difference of almost a percent, and a layout may differ from the reference by twice as much as one
rank in bfloat16 does. The norm of one rank in bfloat16 may be right by chance. So a layout's norm may be off by twice the length of the difference between one rank's
bfloat16 and fp32 gradients, all of them taken as one vector.

"""


PIPELINE = """## Pipelines

The same comparison with a pipeline of 2, 4 or 8 ranks. The remaining ranks use data, context or tensor parallelism, the last in all its forms. Every schedule runs with as many
micro-batches as pipeline ranks, with twice as many, and with an odd number (one more than twice as many, or one more than the ranks where a schedule takes only whole
rounds); once and repeated; and with each kind of activation checkpointing. Every schedule runs with each of its micro-batch counts for each number of pipeline ranks. {selection}
[pipeline_test](../tests/distributed/pipeline_test.cpp) fails if a difference exceeds its tolerance.

"""


def results_in(text):
    lines = [line[line.find("{"):] for line in text.splitlines() if any(f'{{"{test}"' in line for test in TESTS)]
    return [json.loads(line) for line in lines]


def run(test, ranks, every):
    command = [PROGRAMS / "titan", "launch", "-n", str(ranks), "--", PROGRAMS / "distributed_tests", f"--file={test}_test"] + (["--all"] if every else [])
    process = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=3600)
    if process.returncode != 0:
        sys.exit(f"{ranks} ranks: {test}_test failed\n{process.stdout[-4000:]}{process.stderr[-4000:]}")
    return results_in(process.stdout)


SELECTIONS = {
    False: "The layouts cover every pair\nof settings; the nightly tests run more.",
    True: "The layouts cover every pair\nof settings. For `pipelined` in float64 they also include every schedule with each count, each kind of checkpointing, and dp_shard 2, cp 2 and tp 2, "
    "as the nightly tests do.",
}


def run_all(ranks, every):
    # A pipeline has 2, 4 or 8 ranks.
    counts = {"composition": ranks, "pipeline": [count for count in ranks if count in (2, 4, 8)]}
    return [result for test in TESTS for count in counts[test] for result in run(test, count, test in every)]


def order(test, result):
    names = list(TESTS[test])
    model = result[test]
    return PRECISIONS.index(result["precision"]), names.index(model) if model in names else len(names), model, result["ranks"]


def table(test, results):
    lines = ["| precision | model | ranks | layouts | loss | gradient norm | worst gradient | its parameter | tolerance |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    mine = [result for result in results if test in result and result["layouts"] > 0]
    for result in sorted(mine, key=lambda result: order(test, result)):
        lines.append("| {precision} | {model} | {ranks} | {layouts} | {loss:.1e} | {norm:.1e} | {gradient:.1e} | {parameter} | "
                     "{tolerance} |".format(**result, model=result[test], tolerance=TOLERANCES[result["precision"]]))
    models = "\n".join(f"- `{name}`: {what}" for name, what in TESTS[test].items())
    return "\n".join(lines) + f"\n\nThe models{SIZES.get(test, '')}:\n\n{models}\n"


def page(results, every):
    head = HEAD.format(selection="All combinations are run" if "composition" in every else "The runs cover every pair of settings; the nightly tests run all combinations",
                       date=datetime.date.today().isoformat())
    return f"{head}{table('composition', results)}\n{PIPELINE.format(selection=SELECTIONS['pipeline' in every])}{table('pipeline', results)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,3,4")
    parser.add_argument("--eight", action="store_true", help="also run 8 ranks")
    parser.add_argument("--all", nargs="?", const="composition,pipeline", default="", metavar="TESTS", help="run what the nightly tests run")
    parser.add_argument("--read", action="append", type=pathlib.Path, metavar="FILE", help="read a test's output from FILE")
    parser.add_argument("--print", action="store_true", help="write to the terminal instead of the page")
    arguments = parser.parse_args()
    every = arguments.all.split(",")
    ranks = [int(word) for word in arguments.ranks.split(",")] + ([8] if arguments.eight else [])
    if arguments.read:
        results = [result for file in arguments.read for result in results_in(file.read_text())]
    else:
        results = run_all(ranks, every)
    text = page(results, every)
    if arguments.print:
        print(text)
    else:
        _, title, rest = PAGE.read_text().partition("\n## Random layouts\n")  # written by hand, followed by the part of scripts/float8_snr.py
        PAGE.write_text(text + title + rest)


if __name__ == "__main__":
    main()
