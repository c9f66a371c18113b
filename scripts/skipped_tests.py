#!/usr/bin/env python3
"""What a run of the tests has left out, and why: a skipped test is no failure to ctest, so somebody has to look.

    scripts/skipped_tests.py build/test_results.xml

reads what `ctest --output-junit` wrote (scripts/test.sh does so). Tests for GPUs, and cases for another number of ranks, are counted; the
others are listed with their reason, also where a test program has skipped some of its cases only. With TITAN_NO_SKIPS=1, for a machine that has all
that the tests need, such a one is an error (exit status 1).
"""

import os
import re
import sys
import xml.etree.ElementTree

# What another test makes up for: the same cases on a GPU, on another number of ranks, or at night.
ELSEWHERE = re.compile(
    r"no GPU is visible|a GPU is visible|there is a GPU|this rank has a GPU|on GPUs only|from GPUs only|on a GPU has to be copied|symmetric memory may be there|"
    r"needs a peer|(needs|takes|made for) (\w+|\d x \d) ranks|takes a shard axis|takes one axis of ranks, or two|one rank |on one rank|of two ranks|hidden features don't divide|"
    r"the machine is too busy|a long form"
)
ON_A_GPU = re.compile(r"\.(cuda|nccl)$")
# As googletest prints it, under `titan launch` too.
CASE = re.compile(r"^(?:\[rank \d+\] )?\S*?([^/\s]+:\d+): Skipped\n(?:\[rank \d+\] )?(.*)$", re.MULTILINE)


def reasons(test: xml.etree.ElementTree.Element) -> list[str]:
    """The reasons for everything that was skipped in a test, with the case's place where there is one."""
    output = test.findtext("system-out") or ""
    cases = [f"{place}: {reason.strip()}" for place, reason in CASE.findall(output)]
    if cases or test.find("skipped") is None:
        return cases
    lines = output.strip().splitlines()
    return [lines[-1] if lines else "no reason given"]


def main(path: str) -> int:
    counted, listed = 0, []
    for test in xml.etree.ElementTree.parse(path).iter("testcase"):
        name = test.get("name", "")
        for reason in reasons(test):
            if ON_A_GPU.search(name) or ELSEWHERE.search(reason):
                counted += 1
            else:
                listed.append(f"  {name}: {reason}")
    if counted:
        print(f"{counted} skipped that a GPU, another number of ranks or a nightly run is for")
    if not listed:
        return 0
    strict = os.environ.get("TITAN_NO_SKIPS") == "1"
    print(f"{'error: ' if strict else ''}{len(listed)} skipped for what this machine lacks:", *sorted(listed), sep="\n")
    return 1 if strict else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
