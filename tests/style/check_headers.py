#!/usr/bin/env python3
"""No public header includes a header of CUDA, NCCL or all of LibTorch, and with BUILD_DIR each compiles alone.
check_headers.py SOURCE_DIR [BUILD_DIR]

A header is compiled with the flags of a layer that uses as much of LibTorch as it does, after that layer's precompiled header, which takes a
fraction of a second instead of 3 to 15 s. So missing includes of LibTorch's headers aren't detected, but missing includes of LibTitan's are. The
compiler is clang, which reads precompiled headers in a third of GCC's time, or else the build's."""

import concurrent.futures
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

HEAVY = re.compile(r"torch/(torch|all|extension)\.h|nccl\.h|cuda\w*\.h|c10/cuda/.*|ATen/cuda/.*")
INCLUDE = re.compile(r'^\s*#include\s+["<]([^">]+)[">]', re.M)
WORKERS = 2


class Headers:
    """The public headers and what each includes, directly and through other public ones."""

    def __init__(self, folder: pathlib.Path):
        paths = sorted(folder.rglob("*.h"))
        self.includes = {str(path.relative_to(folder)): INCLUDE.findall(path.read_text(encoding="utf-8")) for path in paths}

    def reached(self, header: str) -> set[str]:
        seen, left = set(), [header]
        while left:
            new = [name for name in self.includes.get(left.pop(), []) if name not in seen]
            seen.update(new)
            left += new
        return seen

    def layer_like(self, header: str) -> str:
        """A layer with flags that suit the header."""
        reached = self.reached(header)
        if any(name.startswith("torch/nn/") for name in reached):
            return "nn"
        return "tensor" if any(name.startswith(("ATen/", "c10/", "torch/")) for name in reached) else "core"


PRECOMPILED = {"tensor": "pch_tensor.h", "nn": "pch.h"}
SYNTAX_ONLY = ["-fsyntax-only", "-x", "c++", "-"]


def words_of(layer: str, commands: list[dict]) -> list[str]:
    return shlex.split(next(entry["command"] for entry in commands if f"titan_{layer}.dir/" in entry["command"]))


def as_built(words: list[str]) -> list[str]:
    for option in ("-o", "-c", "-MT", "-MF"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    return [word for word in words if word != "-MD"] + SYNTAX_ONLY


def by_clang(layer: str, words: list[str], source: pathlib.Path, folder: pathlib.Path) -> list[str]:
    flags = ["clang++", "-w", "-fPIC"]
    for word, following in zip(words, words[1:] + [""]):
        if word.startswith(("-D", "-I", "-std=")):
            flags.append(word)
        elif word == "-isystem":
            flags += [word, following]
    if layer in PRECOMPILED:
        precompiled = folder / f"{layer}.pch"
        subprocess.run([*flags, "-x", "c++-header", source / "cmake" / PRECOMPILED[layer], "-o", precompiled], check=True)
        flags += ["-include-pch", str(precompiled)]
    return flags + SYNTAX_ONLY


def compile_each(headers: Headers, source: pathlib.Path, build: pathlib.Path) -> list[str]:
    """The compiler's messages for headers that don't compile."""
    commands = json.loads((build / "compile_commands.json").read_text())
    words = {layer: words_of(layer, commands) for layer in ("core", "tensor", "nn")}
    with tempfile.TemporaryDirectory() as folder:
        if shutil.which("clang++"):
            flags = {layer: by_clang(layer, words[layer], source, pathlib.Path(folder)) for layer in words}
        else:
            flags = {layer: as_built(words[layer]) for layer in words}

        def compile_alone(header: str) -> str:
            run = subprocess.run(flags[headers.layer_like(header)], cwd=build, input=f'#include "{header}"\n', text=True, capture_output=True)
            return "" if run.returncode == 0 else f"{header} does not compile alone:\n{run.stderr}"

        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            return list(filter(None, pool.map(compile_alone, headers.includes)))


def main() -> int:
    source = pathlib.Path(sys.argv[1])
    headers = Headers(source / "include")
    problems = [f"{header} includes {name}" for header, names in headers.includes.items() for name in names if HEAVY.fullmatch(name)]
    if len(sys.argv) > 2:
        problems += compile_each(headers, source, pathlib.Path(sys.argv[2]))
    print("\n".join(problems) or f"{len(headers.includes)} headers checked")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
