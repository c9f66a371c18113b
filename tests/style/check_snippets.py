#!/usr/bin/env python3
"""Every C++ block of docs/extending.md compiles. check_snippets.py SOURCE_DIR BUILD_DIR

All blocks become one source, each in its own namespace, with the headers that their section links. A block's registration, its last
paragraph, becomes the body of a function. PREAMBLES declares what the text says the reader has already. Errors name lines of the page."""

import json
import pathlib
import re
import subprocess
import sys

from check_headers import as_built, words_of

PAGE = "docs/extending.md"
STANDARD = ("algorithm", "cctype", "cmath", "cstdio", "filesystem", "memory", "string", "vector")
TITAN = ("cli/main.h", "train/trainer.h")


def settings(name: str, member: str) -> str:
    return f"struct {name} {{ {member}; }};\nvoid describe(titan::config::Table<{name}>& table);\n"


PREAMBLES = {
    "How your code joins the program": "void register_my_model();",
    "Model": settings("TinyArgs", "int64_t dim = 64, vocab_size = 2048")
    + """struct TinyModel : titan::train::TrainableModel {
           TinyModel(const TinyArgs&, const titan::nn::Construct&);
           titan::nn::AnyRef root() override;
           at::Tensor loss(const at::Tensor&, const at::Tensor&, const titan::ops::ValidTokens&) override;
         };""",
    "Parallelism with its own communication": """struct SlicesSettings;
         void share_rows(const titan::nn::AnyRef&, const titan::DeviceMesh&, const SlicesSettings&);
         bool shares_rows(const titan::nn::AnyRef&);""",
    "Loss": settings("FocalArgs", "double gamma = 2")
    + """struct Focal : titan::ops::TokenLoss {
           explicit Focal(double g) : gamma(g) {}
           titan::ops::TokenLosses evaluate(const titan::ops::TokenStatistics&) const override;
           double gamma;
         };""",
    "Optimizer": settings("MomentumArgs", "double momentum = 0.9"),
    "Learning-rate schedule": settings("InverseSqrtArgs", "int64_t warmup_steps = 100"),
    "Checkpoint storage": "using Path = std::filesystem::path;",
}


def source_of(page: str) -> str:
    headers = re.findall(r"\]\(\.\./include/([\w/]+\.h)\)", page)
    source = [f"#include <{name}>" for name in STANDARD]
    source += [f'#include "{name}"' for name in dict.fromkeys([*headers, *(f"titan/{name}" for name in TITAN)])]
    for section in re.finditer(r"^## (.*)\n((?:(?!## ).*\n)*)", page, flags=re.M):
        for block in re.finditer(r"```cpp\n(.*?)```", section[2], flags=re.S):
            first = page.count("\n", 0, section.start(2) + block.start(1)) + 1
            declarations, blank, last = block[1].rpartition("\n\n")
            if not re.match(r"[\w:<>]+\(", last):
                declarations, last = block[1], ""
            source += [f"namespace block_of_line_{first} {{", PREAMBLES.get(section[1], ""), f'#line {first} "{PAGE}"', declarations]
            source += [f'void registration() {{\n#line {first + (declarations + blank).count(chr(10))} "{PAGE}"', last, "}}"]
    return "\n".join(source) + "\n"


def main() -> int:
    root, build = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    page = (root / PAGE).read_text(encoding="utf-8")
    command = as_built(words_of("job", json.loads((build / "compile_commands.json").read_text())))
    run = subprocess.run(command, cwd=build, input=source_of(page), text=True, capture_output=True)
    print(run.stderr if run.returncode else f"{page.count('```cpp')} blocks compile")
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
