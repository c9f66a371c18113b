#!/usr/bin/env python3
"""Measures how long it takes to build and link `titan` again after one file was touched, without a compiler cache. Prints one JSON object.

    benchmarks/rebuild_time.py [HEADER...] [--files N] [--build DIR] [--output FILE]

CMake's unity builds compile several sources as one batch; a few sources are compiled alone. The script touches the given
headers, and one source in each of the N batches (default 10) that took longest in the last build, according to ninja's log. That build must also have run
without a compiler cache. Keys: unchanged_s (nothing touched), headers and files (seconds by path), slowest_s and median_s of the files. Run it on an idle machine, after a build."""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def seconds_by_batch(build: pathlib.Path) -> dict[str, float]:
    """Seconds of the last compilation of each batch, and of each source that is compiled alone."""
    seconds = {}
    for line in (build / ".ninja_log").read_text().splitlines()[1:]:
        start, end, _, output, _ = line.split("\t")
        is_ours = re.fullmatch(r"CMakeFiles/titan_(?!cuda)\w+\.dir/(Unity/unity_\w+\.cxx|src/.+\.cpp)\.o", output) and "_test" not in output
        if is_ours and first_source(build, output).exists():
            seconds[output] = (int(end) - int(start)) / 1000
    return seconds


def first_source(build: pathlib.Path, batch: str) -> pathlib.Path:
    path = batch.removesuffix(".o")
    if "/Unity/" not in batch:
        return REPOSITORY / path.split(".dir/", 1)[1]
    if not (build / path).exists():  # the batch no longer exists
        return build / path
    return pathlib.Path(re.search(r'#include "(.+)"', (build / path).read_text()).group(1))


def build_seconds(build: pathlib.Path) -> float:
    begin = time.perf_counter()
    command = ["cmake", "--build", build, "--target", "titan"]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CCACHE_DISABLE": "1"})
    if run.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{run.stdout}{run.stderr}")
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("headers", nargs="*", type=pathlib.Path, metavar="HEADER")
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--build", type=pathlib.Path, default=REPOSITORY / "build")
    parser.add_argument("--output", type=pathlib.Path, help="also write the JSON object to this file")
    options = parser.parse_args()
    build_seconds(options.build)
    seconds = seconds_by_batch(options.build)
    batches = sorted(seconds, key=seconds.get, reverse=True)[: options.files]
    result = {"unchanged_s": build_seconds(options.build)}
    for key, files in (("headers", options.headers), ("files", [first_source(options.build, batch) for batch in batches])):
        result[key] = {}
        for file in files:
            file.touch()
            path = str(file.resolve().relative_to(REPOSITORY))
            result[key][path] = build_seconds(options.build)
            print(f"{path}: {result[key][path]:.1f} s", file=sys.stderr)
    times = result["files"].values()
    result |= {"slowest_s": max(times), "median_s": statistics.median(times)}
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
