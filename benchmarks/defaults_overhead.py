#!/usr/bin/env python3
"""Measures the cost per step of everything that watches a run by default: structured logs, stragglers, watchdog, ring of collectives, beats.

    benchmarks/defaults_overhead.py [--pairs 10] [--steps 60] [--small-pairs 10] [--small-steps 600] [--ranks 2] [--config FILE]
                                    [--only NAME] [--output FILE]

Some parts have a switch. For these, the script runs the debug run with everything on, as by default, and with these parts off. The runs
alternate, and so does the order within a pair, so that other work on the machine affects both. A run is represented by its median step
after the first ten, a pair by the ratio of its two runs, and all pairs by their median ratio and its quartiles. Quartiles that are far apart,
like a high load average, mean that the machine wasn't quiet. The same ratio is printed for the processor time of whole runs, which other
work on the machine affects less. --only NAME turns off only one part (structured_logs, stragglers, watchdog, flight_record).

On a machine that isn't quiet, steps vary by more than these parts cost. But the cost depends on the number of steps, collectives and seconds, and
not on the size of a tensor. So the same model with the same modules and collectives, but with small tensors and a row of a few tokens, pays the same
per step in far shorter steps. That difference in milliseconds, divided by the debug run's step, is "small_percent", with its quartiles.

Other parts have no switch. With --comm.trace_buf_size=0 no file is kept, but the last 1,024 calls are still recorded, because the watchdog
asks which call a rank waits in, and the ranks' beats continue. Their cost is computed: the number of calls per step, from a run's own record, times
the cost of one call in flight_record_bench; and the processor time of all watching threads (with a switch or without) in all processes of a run, as
if all of it were taken from the step. "overhead_percent" is the sum of both and "small_percent".

Prints a JSON object; --output also writes it to a file. Needs build/bin/titan, build/bin/flight_record_bench and the config's data; the script
itself uses only Python's standard library.
"""
import argparse
import json
import os
import pathlib
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
TITAN = REPOSITORY / "build/bin/titan"
CALL_BENCH = REPOSITORY / "build/bin/flight_record_bench"
OFF = {
    "structured_logs": "--metrics.structured_logs.no_enable",
    "stragglers": "--metrics.stragglers.no_enable",
    "watchdog": "--comm.no_watchdog",
    "flight_record": "--comm.trace_buf_size=0",
}
SMALL = ["--training.seq_len=16", "--training.local_batch_size=1", "--model.args.dim=64", "--model.args.vocab_size=2048"]
WARM_UP = 10
RUN_LIMIT_S = 1800
SIGNS_S = 15  # how long the processor time of the watching threads is measured


def processor_seconds():
    """Processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def command_of(arguments, folder, steps, switches):
    words = [TITAN, "train", arguments.config, "--nproc", arguments.ranks, f"--training.steps={steps}", "--training.device=cpu",
             "--metrics.log_freq=1", f"--job.dump_folder={folder}", *switches]
    return [str(word) for word in words]


def environment_of(arguments):
    return {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // arguments.ranks))}


def run(arguments, steps, switches):
    """The median step and the processor time of a run, in seconds."""
    before = processor_seconds()
    with tempfile.TemporaryDirectory(prefix="titan_overhead_") as folder:
        command = command_of(arguments, folder, steps, switches)
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_LIMIT_S, env=environment_of(arguments))
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        rows = [json.loads(line) for line in open(pathlib.Path(folder) / "metrics.jsonl", encoding="utf-8")]
    return {"step_s": statistics.median(row["step_s"] for row in rows[WARM_UP:]), "processor_s": processor_seconds() - before}


def sign_seconds(pids):
    """Processor time so far of these processes' threads that watch and send beats, and of the store that receives them."""
    total = 0
    for task in (task for pid in pids for task in pathlib.Path(f"/proc/{pid}/task").iterdir()):
        try:
            name = (task / "comm").read_text().strip()
            if name.startswith(("titan-", "pt_tcpstore")):
                total += int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:
            pass  # the thread has ended
    return total * 1e-9


def wait_for(condition, process):
    end = time.monotonic() + RUN_LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            sys.exit(f"{TITAN} ended early, or didn't reach its first steps")
        time.sleep(0.2)


def without_switch(arguments):
    """The parts without a switch: calls per step on rank 0, nanoseconds per call, and processor seconds per second of the watching threads."""
    bench = json.loads(subprocess.run([CALL_BENCH], capture_output=True, text=True, check=True).stdout)
    with tempfile.TemporaryDirectory(prefix="titan_overhead_") as folder:
        metrics, record = pathlib.Path(folder) / "metrics.jsonl", pathlib.Path(folder) / "comm_traces/rank_0.json"
        process = subprocess.Popen(command_of(arguments, folder, 1_000_000, []), cwd=REPOSITORY, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, env=environment_of(arguments))
        try:
            wait_for(lambda: metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") > 3, process)
            ranks = [int(pid) for pid in pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
            everyone = [process.pid, *ranks]
            before, start = sign_seconds(everyone), time.monotonic()
            time.sleep(SIGNS_S)
            signs = (sign_seconds(everyone) - before) / (time.monotonic() - start)
            os.kill(ranks[0] if ranks else process.pid, signal.SIGQUIT)
            wait_for(record.exists, process)
            recorded = json.loads(record.read_text(encoding="utf-8"))["titan"]
        finally:
            process.terminate()
            process.wait()
    # The calls of the start-up are included, so the number is slightly too large.
    return {"calls_per_step": recorded["num_calls"] / max(1, recorded["step"]), "call_ns": bench["call_ns"], "signs_s_per_s": signs}


def overhead(pair, figure):
    return 100 * (pair["on"][figure] / pair["off"][figure] - 1)


def measure(arguments, count, steps, sizes):
    switches = [OFF[arguments.only]] if arguments.only else list(OFF.values())
    pairs = []
    for number in range(count):
        sides = [("on", sizes), ("off", sizes + switches)]
        took = {name: run(arguments, steps, words) for name, words in (sides if number % 2 == 0 else reversed(sides))}
        pairs.append(took)
        print(f"pair {number + 1} of {count}: {1e3 * took['on']['step_s']:.3f} ms on, {1e3 * took['off']['step_s']:.3f} ms off, "
              f"{overhead(took, 'step_s'):+.2f} %; {overhead(took, 'processor_s'):+.2f} % of processor time", file=sys.stderr)
    return switches, pairs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--small-pairs", type=int, default=10)
    parser.add_argument("--small-steps", type=int, default=600)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--config", type=pathlib.Path, default=REPOSITORY / "configs/llama3_debug.toml")
    parser.add_argument("--only", choices=OFF)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    if min(arguments.pairs, arguments.small_pairs) < 2 or min(arguments.steps, arguments.small_steps) <= 2 * WARM_UP or arguments.ranks < 1:
        parser.error(f"needs at least two pairs, more than {2 * WARM_UP} steps, and at least one rank")
    load_before = os.getloadavg()[0]
    always = without_switch(arguments)
    switches, pairs = measure(arguments, arguments.pairs, arguments.steps, [])
    _, small_pairs = measure(arguments, arguments.small_pairs, arguments.small_steps, SMALL)
    low, middle, high = statistics.quantiles((overhead(pair, "step_s") for pair in pairs), n=4)
    processor_low, processor, processor_high = statistics.quantiles((overhead(pair, "processor_s") for pair in pairs), n=4)
    on_s = statistics.median(pair["on"]["step_s"] for pair in pairs)
    record = 100 * always["calls_per_step"] * always["call_ns"] * 1e-9 / on_s
    signs = 100 * always["signs_s_per_s"]
    small = [100 * (pair["on"]["step_s"] - pair["off"]["step_s"]) / on_s for pair in small_pairs]
    small_low, small_middle, small_high = statistics.quantiles(small, n=4)
    result = {
        "benchmark": "defaults_overhead",
        "config": arguments.config.name,
        "ranks": arguments.ranks,
        "steps": arguments.steps,
        "off": switches,
        "pairs": pairs,
        "on_ms": 1e3 * on_s,
        "off_ms": 1e3 * statistics.median(pair["off"]["step_s"] for pair in pairs),
        "overhead_percent": small_middle + record + signs,
        "small_pairs": small_pairs,
        "small_on_ms": 1e3 * statistics.median(pair["on"]["step_s"] for pair in small_pairs),
        "small_off_ms": 1e3 * statistics.median(pair["off"]["step_s"] for pair in small_pairs),
        "small_percent": small_middle,
        "small_percent_quartiles": [small_low, small_high],
        "switched_percent": middle,
        "switched_percent_quartiles": [low, high],
        "always_on": always,
        "records_percent": record,
        "signs_of_life_percent": signs,
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
