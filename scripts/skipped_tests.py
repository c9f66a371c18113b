#!/usr/bin/env python3
"""Reports which tests a run skipped, and why; ctest doesn't count a skipped test as a failure.

    scripts/skipped_tests.py build/test_results.xml

It reads the output of `ctest --output-junit`, which scripts/test.sh writes. Tests for GPUs and cases for another number of ranks are only counted. The
others are listed with their reasons, even if a test program skipped only some of its cases. With TITAN_NO_SKIPS=1, for a machine that has everything
the tests need, a listed test is an error (exit status 1); with TITAN_NO_SKIPS=NAME, the test of that name is. A test on virtual GPUs that finds no GPU
or skips all of its cases always is one.
"""

import os
import re
import sys
import xml.etree.ElementTree

# These cases run elsewhere: on a GPU, on another number of ranks, or in a nightly test.
ELSEWHERE = re.compile(
    r"no GPU is visible|a GPU is visible|there is a GPU|this rank has a GPU|on GPUs only|from GPUs only|on a GPU has to be copied|symmetric memory may be there|"
    r"needs a peer|(needs|takes|made for) (\w+|\d x \d) ranks|needs a shard axis|needs an even number of ranks|one rank |on one rank|of two ranks|hidden features aren't a multiple|"
    r"the machine is too busy|a long form"
)
NO_GPU = "no GPU is visible"
VIRTUAL = re.compile(r"(^|\.)virtual")
NONE_RAN = re.compile(r"\[  PASSED  \] 0 tests\.")
ON_A_GPU = re.compile(r"\.(cuda|nccl)$")
# The line that googletest prints, also under `titan launch`.
CASE = re.compile(r"^(?:\[rank \d+\] )?\S*?([^/\s]+:\d+): Skipped\n(?:\[rank \d+\] )?(.*)$", re.MULTILINE)


def reasons(test: xml.etree.ElementTree.Element) -> list[str]:
    """The reason for each skipped case of a test, with its place in the source, or for the whole test."""
    output = test.findtext("system-out") or ""
    cases = [f"{place}: {reason.strip()}" for place, reason in CASE.findall(output)]
    if cases or test.find("skipped") is None:
        return cases
    lines = output.strip().splitlines()
    return [lines[-1] if lines else "no reason given"]


def main(path: str) -> int:
    counted, listed, blind, names = 0, [], [], set()
    no_skips = os.environ.get("TITAN_NO_SKIPS")
    for test in xml.etree.ElementTree.parse(path).iter("testcase"):
        name = test.get("name", "")
        names.add(name)
        on_virtual_gpus = VIRTUAL.search(name)
        if on_virtual_gpus and NONE_RAN.search(test.findtext("system-out") or ""):
            blind.append(f"  {name}: all cases are skipped")
        for reason in reasons(test):
            if (NO_GPU in reason and on_virtual_gpus) or name == no_skips:
                blind.append(f"  {name}: {reason}")
            elif ON_A_GPU.search(name) or ELSEWHERE.search(reason):
                counted += 1
            else:
                listed.append(f"  {name}: {reason}")
    if no_skips not in (None, "", "0", "1", *names):
        blind.append(f"  {no_skips}: isn't among the tests")
    if counted:
        print(f"{counted} skipped because they need a GPU, another number of ranks or a nightly run")
    if blind:
        print("error: tests that mustn't be skipped, or that ran nothing on virtual GPUs:", *sorted(blind), sep="\n")
    if not listed:
        return 1 if blind else 0
    strict = no_skips == "1"
    print(f"{'error: ' if strict else ''}{len(listed)} skipped because this machine lacks something:", *sorted(listed), sep="\n")
    return 1 if strict or blind else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
