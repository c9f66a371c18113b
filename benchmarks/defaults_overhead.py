#!/usr/bin/env python3
"""What all that watches a run by default costs a step: structured logs, stragglers, watchdog, ring of collectives, signs of life.

    benchmarks/defaults_overhead.py [--pairs 10] [--steps 60] [--small-pairs 10] [--small-steps 600] [--ranks 2] [--config FILE]
                                    [--only NAME] [--output FILE]

What has a switch: the debug run, once as it is by default and once with these off, alternately, so that what else the machine does
meets both; which of a pair comes first alternates too. Of each run the median step after the first ten counts, of each pair the ratio
of the two, and of all pairs the median ratio, with the quartiles beside it: where they are far apart the machine wasn't quiet, which
the load that is printed says too. Beside it stands the same of the processor time of whole runs, which other work on the machine moves
less. --only leaves all on but one (structured_logs, stragglers, watchdog, flight_record), to see what that one costs.

Steps of a machine that isn't quiet change by more than what is looked for. But all of this costs by the step, the collective and the
second, and nothing by the size of a tensor. So the same model with the same modules and collectives, but small tensors and a row of a
few tokens, pays as much a step in far shorter steps: that difference in milliseconds, over the debug run's step, is
"small_percent", with its quartiles.

What has none: with --comm.trace_buf_size=0 no file is kept, but the last 1,024 calls are still recorded (the watchdog asks which one a
rank waits in), and the ranks' signs of life go on. Their cost is added: calls a step, as a run's own record counts them, times what
flight_record_bench has for one; and the processor time of all threads that watch, with a switch or without, of all processes of a run, as
if all of it came off the step. "overhead_percent" is the sum, with "small_percent".

Prints a JSON object; --output writes it to a file. Needs build/bin/titan, build/bin/flight_record_bench and the config's data; itself
only Python's standard library.
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
SIGNS_S = 15  # so long their threads are looked at


def processor_seconds():
    """The processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def command_of(arguments, folder, steps, switches):
    words = [TITAN, "train", arguments.config, "--nproc", arguments.ranks, f"--training.steps={steps}", "--training.device=cpu",
             "--metrics.log_freq=1", f"--job.dump_folder={folder}", *switches]
    return [str(word) for word in words]


def environment_of(arguments):
    return {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // arguments.ranks))}


def run(arguments, steps, switches):
    """The median step of a run, and its processor time, in seconds."""
    before = processor_seconds()
    with tempfile.TemporaryDirectory(prefix="titan_overhead_") as folder:
        command = command_of(arguments, folder, steps, switches)
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_LIMIT_S, env=environment_of(arguments))
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        rows = [json.loads(line) for line in open(pathlib.Path(folder) / "metrics.jsonl", encoding="utf-8")]
    return {"step_s": statistics.median(row["step_s"] for row in rows[WARM_UP:]), "processor_s": processor_seconds() - before}


def sign_seconds(pids):
    """Processor time, so far, of these processes' threads that watch and give signs of life, and of the store that takes them."""
    total = 0
    for task in (task for pid in pids for task in pathlib.Path(f"/proc/{pid}/task").iterdir()):
        try:
            name = (task / "comm").read_text().strip()
            if name.startswith(("titan-", "pt_tcpstore")):
                total += int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:
            pass  # a thread of something else, which has ended
    return total * 1e-9


def wait_for(condition, process):
    end = time.monotonic() + RUN_LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            sys.exit(f"a run of {TITAN} that was to go on ended, or didn't begin")
        time.sleep(0.2)


def without_switch(arguments):
    """Calls a step on rank 0 and nanoseconds a call, which have no switch, and seconds a second of the threads that watch."""
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
            told = json.loads(record.read_text(encoding="utf-8"))["titan"]
        finally:
            process.terminate()
            process.wait()
    # The calls of the start are among them: a little too many.
    return {"calls_per_step": told["num_calls"] / max(1, told["step"]), "call_ns": bench["call_ns"], "signs_s_per_s": signs}


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
        parser.error(f"there have to be two pairs, more than {2 * WARM_UP} steps and one rank, at least")
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
