#!/usr/bin/env python3
"""Shows where a training step's time goes, by sampling with perf (Debian: linux-perf).

    scripts/profile_step.py [--name NAME] [--rows debug_fp32_1,134m_bf16_2] [--steps 3]

A row is MODEL_DTYPE_RANKS as in run_benchmarks.py. Samples of all ranks, taken after the start-up, are sorted by function:
matrix products (MKL, and oneDNN's generated code), attention, LibTitan's other operations, LibTorch's elementwise operations, the optimizer,
communication, memory that the kernel hands out, threads that wait for work, and the host's own work (autograd, dispatcher, allocation). Products
that LibTorch's attention makes with MKL count as products. Prints a table; --name also writes benchmarks/results/NAME.md
(benchmarks/README.md says how to publish it).
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from run_benchmarks import commit, processor

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
TITAN = REPOSITORY / "build/bin/titan"
ROWS = [f"{m}_{d}_{r}" for m in ("debug", "134m") for d in ("fp32", "bf16") for r in (1, 2)]
START_UP_MS = 2500

# The first pattern that matches "dso symbol" decides.
CATEGORIES = [
    ("products", r"mkl_|gemm|gemv|dnnl|\[JIT\]"),
    ("attention", r"libtitan\S* .*(backward_head|attend_block|pack_queries|pack_keys|pack_rows|pack_panels|unpack_gradient|probabilities)|flash_attention"),
    ("optimizer and clipping", r"adam|sum_squares|sum_on_cpu|foreach"),
    ("communication", r"titan::dist|gloo|process_vm|tcp_|skb_|copy_user|_copy_to_iter|copyout|copyin|rep_movs|pin_user|get_user_pages|gup_|follow_page"),
    ("other LibTitan operations", r"titan::ops"),
    ("elementwise operations of LibTorch", r"at::native|vectorized|TensorIterator|Sleef|__exp|__log|libm\.|memcpy|memmove|memset"),
    ("waiting threads", r"libgomp|libiomp|sched|futex|idle"),
    ("memory from the kernel", r"\[kernel"),
]
HOST = "host"


def category(dso_and_symbol: str) -> str:
    return next((name for name, pattern in CATEGORIES if re.search(pattern, dso_and_symbol)), HOST)


def threads_for(ranks: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def shares(row: str, steps: int) -> dict[str, float]:
    model, dtype, ranks = row.split("_")
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "perf.data"
        command = ["perf", "record", "--quiet", "--freq", "200", "--delay", str(START_UP_MS), "--output", data, "--"]
        command += [TITAN, "train", REPOSITORY / f"benchmarks/configs/{model}_{dtype}.toml", "--nproc", ranks]
        command += ["--job.dump_folder", folder, "--training.steps", str(steps)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads_for(int(ranks)))}
        subprocess.run([str(part) for part in command], check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        report = ["perf", "report", "--input", str(data), "--no-children", "--fields", "overhead,dso,sym", "--percent-limit", "0"]
        lines = subprocess.run(report, check=True, capture_output=True, text=True).stdout.splitlines()
    result = dict.fromkeys([name for name, _ in CATEGORIES] + [HOST], 0.0)
    for line in lines:
        if match := re.match(r"\s*([\d.]+)%\s+(.*)", line):
            result[category(match[2])] += float(match[1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="write benchmarks/results/NAME.md")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    rows = options.rows.split(",")
    if unknown := [row for row in rows if row not in ROWS]:
        sys.exit(f"unknown rows: {', '.join(unknown)}; known are {', '.join(ROWS)}")
    measured = {row: shares(row, options.steps) for row in rows}
    names = [name for name, _ in CATEGORIES] + [HOST]
    lines = [" | ".join(["", "% of samples", *rows, ""]).strip(), " | ".join(["", *["---"] * (len(rows) + 1), ""]).strip()]
    lines += [" | ".join(["", name, *(f"{measured[row][name]:.1f}" for row in rows), ""]).strip() for name in names]
    arguments = " ".join(sys.argv[1:])
    facts = [f"- commit {commit()}, `scripts/profile_step.py {arguments}`", f"- {processor()}; {options.steps} steps, without the first {START_UP_MS} ms"]
    text = "\n".join([f"# Where a step's time goes: {options.name or ''}", "", *facts, "", *lines, ""])
    print(text)
    if options.name:
        results = REPOSITORY / "benchmarks/results"
        results.mkdir(exist_ok=True)
        (results / f"{options.name}.md").write_text(text)


if __name__ == "__main__":
    main()
