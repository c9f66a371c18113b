#!/usr/bin/env python3
"""Fails on an include of a later layer in the table of docs/architecture.md: a layer uses only the layers before it."""

import pathlib
import re
import sys

LAYERS = ["core", "config", "dist", "tensor", "ops", "nn", "float8", "parallel", "optim", "data", "checkpoint", "train", "models", "observe", "guard", "plan", "job", "cli"]
# A model registers itself with the trainer's registry, and the trainer never names a model.
INCLUDE = re.compile(r'^\s*#include\s+["<](?:titan/)?(\w+)/', re.M)


def layer_of(path: pathlib.Path, root: pathlib.Path) -> str | None:
    parts = path.relative_to(root).parts
    if parts[0] == "models":
        return "models"
    if parts[0] == "src" and len(parts) > 2:
        return parts[1]
    if parts[:2] == ("include", "titan") and len(parts) > 3:
        return parts[2]
    return None  # titan.h, the plugin


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    problems = []
    for folder in ("include", "src", "models"):
        for path in sorted((root / folder).rglob("*")):
            layer = layer_of(path, root) if path.suffix in (".h", ".cpp") else None
            if layer not in LAYERS:
                continue
            for used in INCLUDE.findall(path.read_text(encoding="utf-8")):
                if used in LAYERS and LAYERS.index(used) > LAYERS.index(layer):
                    problems.append(f"{path.relative_to(root)}: layer '{layer}' includes '{used}', which lies above it")
    print("\n".join(problems) or "the layers are in order")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
