#!/usr/bin/env python3
"""Every feature in docs/verified_on.md says something of virtual GPUs, the tests that it and the pages on GPUs name exist, and a name with a
star for its ranks is followed by those of CI and of the night. Every test has a program: check_verified.py SOURCE BUILD.
The build folder has the virtual GPUs' tests. A name stands for the tests that it matches, and for those that it begins."""

import fnmatch
import json
import pathlib
import re
import subprocess
import sys

NAME = re.compile(r"`((?:(?:e2e|distributed|nightly|unit|virtual_gpu|style)\.|\*\.\w+\.)[^`\s]+)`")
REASONS = ("no device needed", "no times")  # virtual GPUs have no clock
OF_RANKS = re.compile(r"`(?:distributed|nightly)\.(\w+)\.\*\.virtual`(?: \(([^)]*)\))?")
PAGES = ("docs/verified_on.md", "docs/virtual_gpu.md", "docs/gpu_performance.md")


def listed(ranks: list[int]) -> str:
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return " and ".join(filter(None, (", ".join(map(str, ranks[:-1])), str(ranks[-1]))))


def ranks_of(name: str, tests: list[str]) -> str:
    """As in "2 ranks; at night 1, 3 and 4"."""
    def found(prefix: str) -> list[int]:
        pattern = re.compile(rf"{prefix}\.{name}\.(\d+)_ranks\.virtual")
        return sorted(int(match[1]) for match in map(pattern.fullmatch, tests) if match)
    ci, night = found("distributed"), found("nightly")
    text = f"{listed(ci)} rank{'s' if ci != [1] else ''}" if ci else ""
    if night:
        text += f"; at night {listed(night)}" if ci else f"{listed(night)} rank{'s' if night != [1] else ''}"
    return text


def listed_tests(build: pathlib.Path) -> list[dict]:
    listing = subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1"], capture_output=True, text=True, check=True)
    return json.loads(listing.stdout)["tests"]


def cannot_start(test: dict) -> bool:
    """A target that doesn't exist becomes a bare word, or no command at all. So does the one after `--`, which the first program starts."""
    command = test.get("command")
    started = [word for before, word in zip(command or [], (command or [])[1:]) if before == "--"]
    return not command or not pathlib.Path(command[0]).is_file() or any("/" not in word for word in started)


def problems_of(page: str, tests: list[str]) -> list[str]:
    problems, head = [], ""  # the first cell of the table's head
    for number, line in enumerate(page.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("| ") else []
        head = (head or cells[0]) if cells else ""
        is_row = cells and set(cells[0]) != {"-"} and cells[0] != head
        if is_row and head in ("feature", "fault") and len(cells) < 3:
            problems.append(f"line {number}: the row has {len(cells)} cells")
            continue
        if is_row and head == "feature" and not any("virtual" in name for name in NAME.findall(cells[2])) and not any(reason in cells[2] for reason in REASONS):
            problems.append(f"line {number}: there is neither a test on virtual GPUs nor a reason why not ({', '.join(REASONS)})")
        if is_row and head == "fault" and "`" not in cells[2]:
            problems.append(f"line {number}: the fault has no test")
        for name in NAME.findall(line):
            if not any(fnmatch.fnmatchcase(test, pattern) for pattern in (name, name + ".*") for test in tests):
                problems.append(f"line {number}: there is no test {name}")
        for match in OF_RANKS.finditer(line):
            if match[2] != (expected := ranks_of(match[1], tests)):
                problems.append(f"line {number}: {match[0]} should say ({expected})")
    rows = [line for line in page.splitlines() if line.startswith("| ") and line.count(" | ") == 3]
    features = [row.split(" | ")[0] for row in rows]
    problems += [f"two rows are about {feature[2:]}" for feature in set(features) if features.count(feature) > 1]
    return problems


def main() -> int:
    source, build = map(pathlib.Path, sys.argv[1:])
    listed = listed_tests(build)
    tests = [test["name"].split()[0] for test in listed]
    problems = [f"{test['name']} has no program that could be started: {' '.join(test.get('command', []))}" for test in listed if cannot_start(test)]
    problems += [f"{page}, {problem}" for page in PAGES for problem in problems_of((source / page).read_text(encoding="utf-8"), tests)]
    for problem in problems:
        print(problem)
    if not problems:
        print(f"the tests that {', '.join(PAGES)} name are among {len(tests)}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
