#!/usr/bin/env python3
"""docs/one_training_step.md names files in backticks and functions in bold: each file has to exist, and each function has to be in one of
the files named in its section. The source files that README.md names have to exist too."""

import pathlib
import re
import sys


def problems_of(root: pathlib.Path, page: pathlib.Path) -> list[str]:
    problems = []
    for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.M)[1:]:
        files = sorted(set(re.findall(r"`((?:src|models|include)/[\w/.]+\.(?:cpp|h))`", section)))
        missing = [name for name in files if not (root / name).is_file()]
        problems += [f"{page.name}: {name} doesn't exist" for name in missing]
        text = "\n".join((root / name).read_text(encoding="utf-8") for name in files if name not in missing)
        for function in re.findall(r"\*\*(\w+)\*\*", section):
            if not re.search(rf"\b{function}\s*\(", text):
                problems.append(f"{page.name}: no function {function} in {', '.join(files)}")
    return problems


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    problems = problems_of(root, root / "docs" / "one_training_step.md")
    for name in re.findall(r"`((?:src|models)/[\w/.]+\.cpp)`", (root / "README.md").read_text(encoding="utf-8")):
        if not (root / name).is_file():
            problems.append(f"README.md: {name} doesn't exist")
    print("\n".join(problems) or "the walk-through is up to date")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
