#!/usr/bin/env python3
"""Relative links in README.md, CONTRIBUTING.md and every page in docs and benchmarks have targets that exist. A link that is labeled with a
file's name (`x_test`, `x.h`) points to a file, not to its folder. README.md's C++ lines are taken from an example that a test builds."""

import pathlib
import re
import sys

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def pages_of(root: pathlib.Path) -> list[pathlib.Path]:
    folders = [page for name in ("docs", "benchmarks") for page in sorted((root / name).rglob("*.md"))]
    return [root / "README.md", root / "CONTRIBUTING.md", *folders]


def problems_of_links(root: pathlib.Path, page: pathlib.Path) -> list[str]:
    problems = []
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for label, target in LINK.findall(text):
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            continue
        path = page.parent / target.split("#")[0]
        where = f"{page.relative_to(root)}: [{label}]({target})"
        name = label.strip("`").rsplit("/", 1)[-1]
        if not path.exists():
            problems.append(f"{where} points to nothing")
        elif re.search(r"_test$|\.\w+$", name) and path.is_dir():
            problems.append(f"{where} is labeled as a file and points to a folder")
    return problems


def problems_of_snippet(root: pathlib.Path) -> list[str]:
    examples = "\n".join(path.read_text(encoding="utf-8") for path in (root / "docs" / "examples").rglob("*.cpp"))
    known = {re.sub(r"\s+", " ", line.split("  //")[0]).strip() for line in examples.splitlines()}
    problems = []
    for block in re.findall(r"```cpp\n(.*?)```", (root / "README.md").read_text(encoding="utf-8"), flags=re.S):
        for line in block.splitlines():
            code = re.sub(r"\s+", " ", line.split("  //")[0]).strip()
            if code not in ("", "...") and code not in known:
                problems.append(f"README.md: '{code}' is in no example")
    return problems


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    problems = [problem for page in pages_of(root) for problem in problems_of_links(root, page)]
    problems += problems_of_snippet(root)
    print("\n".join(problems) or "all links point to something")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
