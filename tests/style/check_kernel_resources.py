#!/usr/bin/env python3
"""Compares the registers, the shared memory and the occupancy of each GPU kernel with src/cuda_plugin/kernel_resources.txt, and checks that
none spills. The tables of kernels in docs/gpu_performance.md have to have every kernel, and in the column "asks for at once" bytes that a thread of the
machine code reads before it uses any of them, and what they make for the threads of a multiprocessor (compute capability 9.0, bf16). In PTX, each kernel has
a read and a write of 16 bytes.

usage: check_kernel_resources.py [--write] BUILD_FOLDER

Registers and shared memory are ptxas's, from the build of the CUDA plugin. Occupancy is the share of a multiprocessor's warps that run at
the same time, by the formula of CUDA's occupancy calculator. --write writes the table. Another release of nvcc allocates registers
differently, so then these aren't compared.
"""

import pathlib
import re
import subprocess
import sys

source = pathlib.Path(__file__).resolve().parents[2]
table = source / "src/cuda_plugin/kernel_resources.txt"
docs = source / "docs/gpu_performance.md"
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<target>sm_\w+)'\n.*\n\s*(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\n.*Used (?P<registers>\d+) registers(?P<rest>.*)"
)

# A multiprocessor's warps, blocks, KiB of shared memory (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
LIMITS = {"sm_80": (64, 32, 164), "sm_89": (48, 24, 100), "sm_90": (64, 32, 228), "sm_100": (64, 32, 228)}
REGISTERS, REGISTERS_AT_ONCE, WARPS_AT_ONCE = 65536, 256, 4  # a multiprocessor's; the unit for a warp; warps that take registers together
RESERVED, BYTES_AT_ONCE = 1024, 128  # shared memory: each block's, for CUDA; the unit

# Threads of a block where they aren't 256: for rows of 4,096 elements, casts of 8,192, and a vocabulary of 128,256.
THREADS = {
    "rms_norm_kernel<float>": 512,
    "add_rms_norm_kernel<float>": 512,
    "rms_norm_backward_kernel<__nv_bfloat16>": 128,
    "cross_entropy_kernel": 1024,
    "vocabulary_stats_kernel": 1024,
    "vocabulary_grad_kernel": 1024,
    "measured_rows_kernel": 512,
    "sum_of_rows_kernel": 1024,
}

# Thread blocks of a multiprocessor where a launch has fewer than fit.
BLOCKS = {"rms_norm_backward_kernel": 3, "sum_of_rows_kernel": 1}

# Not compared with the documentation's tables: for casts of longer rows than 8,192.
LONGER_ROWS = ("measured_rows_kernel<E4m3, __nv_bfloat16, 2>", "measured_rows_kernel<E5m2, __nv_bfloat16, 2>")


def occupancy(target, threads, registers, shared):
    max_warps, max_blocks, shared_kib = LIMITS[target]
    warps = -(-threads // 32)
    of_warp = -(-registers * 32 // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
    by_registers = REGISTERS // of_warp // WARPS_AT_ONCE * WARPS_AT_ONCE // warps
    of_block = -(-(shared + RESERVED) // BYTES_AT_ONCE) * BYTES_AT_ONCE
    blocks = min(by_registers, shared_kib * 1024 // of_block, max_warps // warps, max_blocks)
    return blocks * warps / max_warps


# Kernels that work on kilobytes, one whose warps read a row of 32 numbers at a time, those that only write one number for many, and the
# states of adam_kernel that are in bf16.
NARROW_READS = {"scale_kernel", "update_histories_kernel", "sum_of_rows_kernel", "column_blocks_kernel"}
NARROW_WRITES = {"scale_kernel", "update_histories_kernel", "sum_of_rows_kernel", "delayed_scale_kernel", "scales_of_columns_kernel", "magnitudes_kernel", "magnitudes_of_columns_kernel", "amax_of_rows_kernel", "amax_of_many_kernel",
                                "vocabulary_stats_kernel"}
HALF_AS_WIDE = {"adam_kernel<unsigned short, unsigned short, false>", "adam_kernel<unsigned short, unsigned short, true>"}
ACCESS = re.compile(r"(ld|st)\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\s")


def nvcc_of(build):
    return re.search(r"TITAN_NVCC:FILEPATH=(.*)", (build / "CMakeCache.txt").read_text())[1]


def narrow_accesses(build):
    for code in sorted((source / "src/cuda_plugin").glob("*.cu")):
        ptx = build / "cuda" / code.stem / f"{code.stem}.compute_90.ptx"
        if not ptx.exists():
            yield f"{ptx} is missing: build the CUDA plugin for compute capability 9.0"
            continue
        for kernel in re.split(r"\.entry ", ptx.read_text())[1:]:
            name = demangled(re.match(r"\w+", kernel)[0])
            widest = {"ld": 0, "st": 0}
            for verb, count, bits in ACCESS.findall(kernel):
                widest[verb] = max(widest[verb], int(count or 1) * int(bits) // 8)
            for verb, narrow in (("ld", NARROW_READS), ("st", NARROW_WRITES)):
                least = 8 if name in HALF_AS_WIDE else 16
                if name.split("<")[0] not in narrow and widest[verb] < least:
                    yield f"{name}: the widest {verb}.global in PTX has {widest[verb]} bytes instead of {least}"


INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")


def bytes_of(opcode):
    return 16 if ".128" in opcode else 8 if ".64" in opcode else 2 if "16" in opcode else 1 if re.search(r"\.[US]8", opcode) else 4


def asked_at_once(code):
    """The most bytes that reads of the device's memory ask for, in the order of the code, before an instruction needs one of them. Branches aren't
    followed, so reads of two ways through the code count together."""
    waiting, most = {}, 0  # registers, each with its read
    for opcode, rest in INSTRUCTION.findall(code):
        operands = re.split(r",\s*(?![^\[]*\])", rest)
        sources = operands if opcode.startswith(("ST", "RED", "ATOM")) else operands[1:]
        used = {int(number) + more for source in sources for number, pair in re.findall(r"\bR(\d+)(\.64)?", source) for more in range(2 if pair else 1)}
        if opcode.startswith("ST") and (value := re.match(r"R(\d+)", operands[-1])):
            used.update(range(int(value[1]), int(value[1]) + max(1, bytes_of(opcode) // 4)))
        if used & waiting.keys():
            most, waiting = max(most, sum({id(read): read[0] for read in waiting.values()}.values())), {}
        if opcode.startswith("LDG") and (target := re.match(r"R(\d+)", operands[0])):
            read = [bytes_of(opcode)]
            waiting.update({int(target[1]) + i: read for i in range(max(1, read[0] // 4))})
    return most


def wrong_bytes_at_once(build):
    """Kernels of the tables that ask for less at once than these say. Needs a disassembler: CUDA's, or that of PyTorch's Triton."""
    beside = [pathlib.Path(nvcc_of(build)).parent, *source.glob(".venv/lib/python3*/site-packages/triton/backends/nvidia/bin")]
    tool = next((folder / "cuobjdump" for folder in beside if (folder / "cuobjdump").exists()), None)
    if not tool:
        print("the column 'asks for at once' isn't compared with machine code: there is no cuobjdump")
        return
    documented = {name: int(size) for name, size in re.findall(r"^\| `(\w+_kernel)` \|.*?\| (\d+) B, \d+ KiB \|", docs.read_text(), re.MULTILINE)}
    cubins = sorted((build / "cuda").glob("*/*.compute_90.cubin"))
    if not cubins:
        yield f"{build}/cuda has no machine code for compute capability 9.0"
    for cubin in cubins:
        text = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
        for part in text.split("Function : ")[1:]:
            kernel, asked = demangled(part.split("\n")[0].strip()), asked_at_once(part)
            is_other = ("float" in kernel and "bfloat16" not in kernel) if "adam" not in kernel else not kernel.startswith("adam_kernel<float, unsigned short,")
            if not is_other and kernel not in LONGER_ROWS and asked < (said := documented.get(kernel.split("<")[0], 0)):
                yield f"{kernel} asks for {asked} B at once in machine code, and {docs.name} says {said}"


def demangled(name):
    text = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
    text = re.sub(r"\(titan::float8::cuda::Format\)(\d)", lambda m: ["E4m3", "E5m2"][int(m[1])], text)
    return re.sub(r".*\(anonymous namespace\)::", "", text).split("(")[0]


def of_build(build):
    reports = sorted((build / "cuda").glob("*.ptxas"))
    if not reports:
        sys.exit(f"{build}/cuda has no *.ptxas: build the CUDA plugin first (ninja titan_cuda)")
    for report in reports:
        for entry in ENTRY.finditer(report.read_text()):
            found = re.search(r"(\d+) bytes smem", entry["rest"])
            registers, shared, kernel = int(entry["registers"]), int(found[1]) if found else 0, demangled(entry["name"])
            threads = THREADS.get(kernel) or THREADS.get(kernel.split("<")[0]) or 256
            share = occupancy(entry["target"], threads, registers, shared)
            yield entry, kernel, f"{registers} / {shared} / {share:.0%}"


def problems_of_docs(rows):
    """rows: of each kernel with its types, the figures for each target."""
    at_once = {}
    for kernel, figures in rows.items():
        name = kernel.split("<")[0]
        if "sm_90" in figures and kernel not in LONGER_ROWS and ("__nv_bfloat16" in kernel or not any(k.startswith(f"{name}<__nv") or k.startswith(f"{name}<E4m3, __nv") for k in rows)):
            share = int(figures["sm_90"].split("/")[2].strip(" %")) / 100
            threads = round(share * LIMITS["sm_90"][0] / 2) * 64  # percentages are rounded, and numbers of warps even
            if name in BLOCKS:
                threads = min(threads, BLOCKS[name] * (THREADS.get(kernel) or THREADS.get(name) or 256))
            at_once[name] = min(at_once.get(name, threads), threads)
    documented = dict(re.findall(r"^\| `(\w+_kernel)` \|.*?\| ([\d.]+ B, \d+ KiB) \|", docs.read_text(), re.MULTILINE))
    for name in sorted(at_once.keys() ^ documented.keys()):
        yield f"{name} is in {docs.name if name in documented else 'the build'} only"
    for name in sorted(at_once.keys() & documented.keys()):
        of_thread = int(documented[name].split()[0])
        if documented[name] != (expected := f"{of_thread} B, {of_thread * at_once[name] // 1024} KiB"):
            yield f"{name} asks for {expected} at once, and {docs.name} says {documented[name]}"


def nvcc_release(build):
    text = subprocess.run([nvcc_of(build), "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release ([\d.]+)", text)[1]


def main():
    build = pathlib.Path(sys.argv[-1])
    rows, spills = {}, []
    for entry, kernel, figures in of_build(build):
        rows.setdefault(kernel, {})[entry["target"]] = figures
        if entry["stores"] != "0" or entry["loads"] != "0":
            spills.append(f"{kernel} on {entry['target']}: {entry['stores']} bytes stored, {entry['loads']} loaded")
    targets = sorted({t for figures in rows.values() for t in figures}, key=lambda t: int(re.search(r"\d+", t)[0]))
    width = max(len(k) for k in rows)
    text = f"Registers per thread / bytes of shared memory per block / occupancy, by nvcc {nvcc_release(build)}; tests/style/check_kernel_resources.py --write build.\n\n"
    for first, figures in [("", {t: t for t in targets}), *sorted(rows.items())]:
        text += (first.ljust(width) + "".join(figures.get(t, "-").rjust(19) for t in targets)).rstrip() + "\n"
    if spills:
        sys.exit("kernels spill registers to memory:\n  " + "\n  ".join(spills))
    if "--write" in sys.argv:
        table.write_text(text)
        return
    if problems := [*problems_of_docs(rows), *narrow_accesses(build), *wrong_bytes_at_once(build)]:
        sys.exit("\n".join(problems))
    recorded = table.read_text()
    if recorded.split(";")[0] != text.split(";")[0]:
        print(f"registers aren't compared: {table.name} is by another nvcc")
    elif recorded != text:
        old, new = set(recorded.splitlines()), set(text.splitlines())
        sys.exit(
            "kernels need other resources than src/cuda_plugin/kernel_resources.txt says. If that is intended, run "
            "tests/style/check_kernel_resources.py --write build\n" + "\n".join(f"- {l}" for l in old - new) + "\n" + "\n".join(f"+ {l}" for l in new - old)
        )


main()
