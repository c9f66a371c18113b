#!/usr/bin/env python3
"""Every feature in docs/verified_on.md says something of virtual GPUs, and the tests that its page names exist: check_verified.py SOURCE BUILD.
The build folder has the virtual GPUs' tests. A name stands for the tests that it matches, and for those that it begins."""

import fnmatch
import pathlib
import re
import subprocess
import sys

NAME = re.compile(r"`((?:e2e|distributed|nightly|unit|virtual_gpu|style)\.[^`\s]+)`")


def tests_of(build: pathlib.Path) -> list[str]:
    listing = subprocess.run(["ctest", "--test-dir", build, "-N"], capture_output=True, text=True, check=True)
    return re.findall(r"^ *Test +#\d+: (\S+)", listing.stdout, flags=re.M)


def problems_of(page: str, tests: list[str]) -> list[str]:
    problems = []
    for number, line in enumerate(page.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("| ") else []
        if len(cells) == 4 and not cells[2]:
            problems.append(f"line {number}: nothing is said of virtual GPUs")
        for name in NAME.findall(line):
            if not any(fnmatch.fnmatchcase(test, pattern) for pattern in (name, name + ".*") for test in tests):
                problems.append(f"line {number}: there is no test {name}")
    return problems


def main() -> int:
    source, build = map(pathlib.Path, sys.argv[1:])
    tests = tests_of(build)
    problems = problems_of((source / "docs/verified_on.md").read_text(encoding="utf-8"), tests)
    for problem in problems:
        print("docs/verified_on.md,", problem)
    if not problems:
        print(f"the tests that docs/verified_on.md names are among {len(tests)}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
