#!/usr/bin/env python3
"""What all that watches a run by default costs a step: structured logs, stragglers, watchdog, ring of collectives.

    benchmarks/defaults_overhead.py [--pairs 10] [--steps 60] [--ranks 2] [--config FILE] [--only NAME] [--output FILE]

The debug run, once as it is by default and once with these off, alternately, so that what else the machine does meets both; which
of a pair comes first alternates too. Of each run the median step behind the first ten counts, of each pair the ratio of the two, and of all pairs
the median ratio, with the quartiles beside it: where they are far apart the machine wasn't quiet, which the load that is printed says
too. Beside it stands the same of the processor time of whole runs, which other work on the machine moves less. --only leaves all on but one (structured_logs, stragglers, watchdog, flight_record), to see what that one costs. Prints a JSON
object; --output writes it to a file. Needs build/bin/titan and the file's data; itself only Python's standard library.
"""
import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
TITAN = REPOSITORY / "build/bin/titan"
OFF = {
    "structured_logs": "--metrics.structured_logs.no_enable",
    "stragglers": "--metrics.stragglers.no_enable",
    "watchdog": "--comm.no_watchdog",
    "flight_record": "--comm.trace_buf_size=0",
}
WARM_UP = 10
RUN_LIMIT_S = 1800


def processor_seconds():
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(arguments, switches):
    """The median step of a run, and its processor time, in seconds."""
    before = processor_seconds()
    with tempfile.TemporaryDirectory(prefix="titan_overhead_") as folder:
        command = [TITAN, "train", arguments.config, "--nproc", arguments.ranks, f"--training.steps={arguments.steps}",
                   "--training.device=cpu", "--metrics.log_freq=1", f"--job.dump_folder={folder}", *switches]
        cores = max(1, (os.cpu_count() or 1) // arguments.ranks)
        done = subprocess.run([str(word) for word in command], cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_LIMIT_S,
                              env={**os.environ, "OMP_NUM_THREADS": str(cores)})
        if done.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        rows = [json.loads(line) for line in open(pathlib.Path(folder) / "metrics.jsonl", encoding="utf-8")]
    return {"step_s": statistics.median(row["step_s"] for row in rows[WARM_UP:]), "processor_s": processor_seconds() - before}


def overhead(pair, figure):
    return 100 * (pair["on"][figure] / pair["off"][figure] - 1)


def measure(arguments):
    switches = [OFF[arguments.only]] if arguments.only else list(OFF.values())
    pairs = []
    for number in range(arguments.pairs):
        sides = [("on", []), ("off", switches)]
        took = {name: run(arguments, words) for name, words in (sides if number % 2 == 0 else reversed(sides))}
        pairs.append(took)
        print(f"pair {number + 1} of {arguments.pairs}: {1e3 * took['on']['step_s']:.3f} ms on, {1e3 * took['off']['step_s']:.3f} ms off, "
              f"{overhead(took, 'step_s'):+.2f} %; {overhead(took, 'processor_s'):+.2f} % of processor time", file=sys.stderr)
    return switches, pairs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--config", type=pathlib.Path, default=REPOSITORY / "configs/llama3_debug.toml")
    parser.add_argument("--only", choices=OFF)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.pairs < 2 or arguments.steps <= 2 * WARM_UP or arguments.ranks < 1:
        parser.error(f"there have to be two pairs, more than {2 * WARM_UP} steps and one rank, at least")
    load_before = os.getloadavg()[0]
    switches, pairs = measure(arguments)
    low, middle, high = statistics.quantiles((overhead(pair, "step_s") for pair in pairs), n=4)
    processor_low, processor, processor_high = statistics.quantiles((overhead(pair, "processor_s") for pair in pairs), n=4)
    result = {
        "benchmark": "defaults_overhead",
        "config": arguments.config.name,
        "ranks": arguments.ranks,
        "steps": arguments.steps,
        "off": switches,
        "pairs": pairs,
        "on_ms": 1e3 * statistics.median(pair["on"]["step_s"] for pair in pairs),
        "off_ms": 1e3 * statistics.median(pair["off"]["step_s"] for pair in pairs),
        "overhead_percent": middle,
        "overhead_percent_quartiles": [low, high],
        "processor_overhead_percent": processor,
        "processor_overhead_percent_quartiles": [processor_low, processor_high],
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
