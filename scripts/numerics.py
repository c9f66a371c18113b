#!/usr/bin/env python3
"""How far every layout's loss and gradients are from one rank's: runs composition_test and pipeline_test, and writes docs/numerics.md.

    scripts/numerics.py [--ranks 1,2,3,4] [--eight] [--all [TESTS]] [--read FILE]... [--print]

--eight adds 8 ranks, --all runs (of composition, pipeline or both) what the nightly tests do instead of a cover of the pairs, --read takes what the tests printed from files
instead of running them, --print writes to the terminal. Needs build/bin/titan and the two tests, and only Python's standard library.
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
    "tiny_vocabulary": "5 tokens: at 4 ranks one has none of them; 4 for 3 ranks",
    "tiny_feed_forward": "a feed-forward of 5 features: at 4 ranks one has none of them; 4 for 3 ranks",
    "tied": "embedding and output are one matrix",
    "one_row": "a batch of one sequence of 8 tokens, of 6 for 3 ranks",
}
PIPELINE_MODELS = {
    "pipelined": "Llama of 7 layers, 4 heads and key heads, 32 features, 16 tokens",
    "shallow": "the same of 2 layers with a vocabulary of 251: most stages have one layer or none",
    "tied": "the same of 7 layers, where embedding and output, on the first and the last stage, are one matrix",
}
SIZES = {"composition": ", which for 3 ranks have 6 heads, 3 key heads, width 48, and batches of 6 sequences of 12 tokens"}
TESTS = {"composition": MODELS, "pipeline": PIPELINE_MODELS}
TOLERANCES = {"float64": "1e-10", "float32": "1e-5", "bfloat16": "2 x one rank's bfloat16"}
PRECISIONS = list(TOLERANCES)

HEAD = """# Numerics

Every product of data (replicated and sharded), context and tensor parallelism that fits a number of ranks, against the same model on one
rank: the loss, the gradient norm and every parameter's gradient, ‖g − ref‖ / ‖ref‖. Tensor parallelism runs in all its forms (with and without
sequence and loss parallelism, overlapped), all with and without activation checkpoints and accumulation: {selection}.
[composition_test](../tests/distributed/composition_test.cpp) fails beyond the tolerances; `scripts/numerics.py` runs it and wrote this
page on {date}, on a CPU (fp32 and bfloat16 differ a little from machine to machine).

In bfloat16 the reference is one rank's fp32: rounding alone is close to a percent there, and a layout may be twice as far away as one
rank's bfloat16 is. One rank's norm may be right by chance, so a layout's norm may be off by twice the length of the difference of one rank's
gradients, bfloat16's from fp32's: all of them, as one vector.

"""


PIPELINE = """## Pipelines

The same with a pipeline of 2, 4 or 8 ranks, and on the ranks that are left data, context or tensor parallelism, the last in all its forms: every
schedule, with as many micro-batches as pipeline ranks and twice as many, where it takes them, and with an odd number (one more than twice as many, or,
where it takes whole rounds only, one more than ranks), in one go and twice, with each kind of activation checkpoints. Every schedule meets each of its
counts at each number of pipeline ranks. {selection}
[pipeline_test](../tests/distributed/pipeline_test.cpp) fails beyond the tolerances.

"""


def results_in(text):
    lines = [line[line.find("{"):] for line in text.splitlines() if any(f'{{"{test}"' in line for test in TESTS)]
    return [json.loads(line) for line in lines]


def run(test, ranks, every):
    command = [PROGRAMS / "titan", "launch", "-n", str(ranks), "--", PROGRAMS / f"{test}_test"] + (["--all"] if every else [])
    process = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=3600)
    if process.returncode != 0:
        sys.exit(f"{ranks} ranks: {test}_test failed\n{process.stdout[-4000:]}{process.stderr[-4000:]}")
    return results_in(process.stdout)


SELECTIONS = {
    False: "As many layouts as it takes for every two settings to meet; the\nnightly tests run more.",
    True: "As many layouts as it takes for every two\nsettings to meet and, of `pipelined` in float64, every schedule with each count, each kind of checkpoints and dp_shard 2, cp 2 and tp 2 in "
    "full,\nas the nightly tests run them.",
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
    lines = ["| precision | model | ranks | layouts | loss | gradient norm | worst gradient | of parameter | tolerance |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    mine = [result for result in results if test in result and result["layouts"] > 0]
    for result in sorted(mine, key=lambda result: order(test, result)):
        lines.append("| {precision} | {model} | {ranks} | {layouts} | {loss:.1e} | {norm:.1e} | {gradient:.1e} | {parameter} | "
                     "{tolerance} |".format(**result, model=result[test], tolerance=TOLERANCES[result["precision"]]))
    models = "\n".join(f"- `{name}`: {what}" for name, what in TESTS[test].items())
    return "\n".join(lines) + f"\n\nThe models{SIZES.get(test, '')}:\n\n{models}\n"


def page(results, every):
    head = HEAD.format(selection="every combination of these" if "composition" in every else "as many combinations as it takes for\nevery two settings to meet; the nightly tests run all",
                       date=datetime.date.today().isoformat())
    return f"{head}{table('composition', results)}\n{PIPELINE.format(selection=SELECTIONS['pipeline' in every])}{table('pipeline', results)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,3,4")
    parser.add_argument("--eight", action="store_true", help="8 ranks too")
    parser.add_argument("--all", nargs="?", const="composition,pipeline", default="", metavar="TESTS", help="what the nightly tests run")
    parser.add_argument("--read", action="append", type=pathlib.Path, metavar="FILE", help="what a test printed")
    parser.add_argument("--print", action="store_true", help="to the terminal")
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
        _, title, float8 = PAGE.read_text().partition("\n## Float8: losses\n")  # by hand, followed by scripts/float8_snr.py's
        PAGE.write_text(text + title + float8)


if __name__ == "__main__":
    main()
