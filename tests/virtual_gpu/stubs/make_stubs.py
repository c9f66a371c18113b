"""Writes the sources of stub libraries from the installed ones.

usage: make_stubs.py TORCH_LIB NVIDIA_LIB OUT

A stub ends the program with the name of the function that was called. Stubs are weak: where a function is written in this
folder, the linker takes that one. Only functions that LibTorch or NVIDIA's other libraries refer to get a stub, in the version
nodes that the references ask for.
"""

import pathlib
import re
import subprocess
import sys

# SONAME, prefix of its functions, prefix that belongs to another library
LIBRARIES = [
    ("libcublas.so.13", "cublas", "cublasLt"),
    ("libcublasLt.so.13", "cublasLt", None),
    ("libcudnn.so.9", "cudnn", None),
    ("libcusparse.so.12", "cusparse", "cusparseLt"),
    ("libcusparseLt.so.0", "cusparseLt", None),
    ("libcufft.so.12", "cufft", None),
    ("libcurand.so.10", "curand", None),
    ("libcufile.so.0", "cuFile", None),
]
HEADER = """#include <stdlib.h>
namespace virtual_gpu { [[noreturn]] void end_program(const char* format, ...); }
#define STUB extern "C" __attribute__((weak))
"""


def symbols(library, kind):
    """Names and versions of the symbols that the library defines or refers to."""
    command = ["nm", "-D", "--with-symbol-versions", f"--{kind}", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    for line in lines:
        name, _, version = line.split()[-1].partition("@")
        yield name, version.lstrip("@")


def aborting(name):
    text = f"virtual GPU: {name} is not written. See docs/virtual_gpu.md.\\n"
    return f'STUB void {name}() {{ virtual_gpu::end_program("{text}"); }}\n'


def body(name, library):
    """Handles can be made and set; work ends the program."""
    if re.search(r"Create(_v2)?$", name) and "Desc" not in name:
        # LibTorch gives each handle of cuBLAS a workspace of its own.
        return f"STUB int {name}(void** h) {{ *h = malloc(1); return 0; }}\n"
    if re.match(r"(cublas|cusparse|cudnn)(Set|Destroy)", name):
        return f"STUB int {name}() {{ return 0; }}\n"
    if name in ("cublasGetMathMode", "cublasGetPointerMode_v2"):
        return f"STUB int {name}(void*, int* mode) {{ *mode = 0; return 0; }}\n"
    if name in ("cublasLtGetVersion", "cudnnGetVersion", "cudnnGetCudartVersion"):
        return f"STUB unsigned long {name}() {{ return {91900 if library.startswith('libcudnn') else 130000}; }}\n"
    return aborting(name)


def write(path, text):
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main():
    torch_lib, nvidia_lib, out = (pathlib.Path(p) for p in sys.argv[1:4])
    users = [*torch_lib.glob("*.so"), *nvidia_lib.glob("libcusolver.so.*"), *nvidia_lib.glob("libcublas.so.*")]
    wanted = {}
    for user in users:
        for name, version in symbols(user, "undefined-only"):
            wanted.setdefault(name, set()).add(version)
    for soname, prefix, other in LIBRARIES:
        names = sorted(n for n in wanted if re.match(prefix + "[A-Z]", n) and not (other and n.startswith(other)))
        write(out / f"{soname}.cpp", HEADER + "".join(body(n, soname) for n in names))
        versions = sorted({v for n in names for v in wanted[n] if v})
        write(out / f"{soname}.map", "".join(f"{v} {{ global: *; }};\n" for v in versions[:1]) or "{ global: *; };\n")
    runtime = next(nvidia_lib.glob("libcudart.so.13"))
    names = sorted({n for n, _ in symbols(runtime, "defined-only") if n.startswith(("cuda", "__cuda"))})
    write(out / "libcudart.so.13.cpp", HEADER + "".join(aborting(n) for n in names))
    names = sorted({n for n in wanted if n.startswith("nccl")})
    write(out / "libnccl.so.2.cpp", HEADER + "".join(aborting(n) for n in names))
    # LibTorch asks whether the driver has these; CUDA_ERROR_NOT_SUPPORTED is its answer.
    driver = sorted(n for n in wanted if re.match("cu[A-Z]", n) and not n.startswith("cuFile"))
    write(out / "libcuda.so.1.cpp", HEADER + "".join(f"STUB int {n}() {{ return 801; }}\n" for n in driver))


main()
