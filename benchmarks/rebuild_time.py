#!/usr/bin/env python3
"""How long `titan` takes to be built and linked again after one source file was touched, without a compiler cache, and prints one JSON object.

    benchmarks/rebuild_time.py [--files N] [--build DIR] [--output FILE]

The N files (default 10) are one each of the library's batches (CMake's unity builds compile several sources as one; a few are compiled
alone) that took longest when they were compiled last, by the build's own log (of a build without a compiler cache, too). Keys: unchanged_s (nothing touched), slowest_s,
median_s, files (seconds by path). Run it on an idle machine, after a build."""

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
    """The time of the last compilation of each of the library's batches, and of the sources outside of them."""
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
    if not (build / path).exists():  # there were more batches once
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
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--build", type=pathlib.Path, default=REPOSITORY / "build")
    parser.add_argument("--output", type=pathlib.Path, help="written too")
    options = parser.parse_args()
    build_seconds(options.build)
    seconds = seconds_by_batch(options.build)
    result = {"unchanged_s": build_seconds(options.build), "files": {}}
    for batch in sorted(seconds, key=seconds.get, reverse=True)[: options.files]:
        source = first_source(options.build, batch)
        source.touch()
        result["files"][str(source.relative_to(REPOSITORY))] = build_seconds(options.build)
        print(f"{source.relative_to(REPOSITORY)}: {result['files'][str(source.relative_to(REPOSITORY))]:.1f} s", file=sys.stderr)
    times = result["files"].values()
    result |= {"slowest_s": max(times), "median_s": statistics.median(times)}
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
