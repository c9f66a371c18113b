#!/usr/bin/env python3
"""Makes tests/data/golden/pytorch_flight/rank_{0,1}.json: the files of PyTorch's Flight Recorder for two gloo ranks. The second rank
never makes the third call. The files contain times and thread numbers, so no two runs write the same bytes.

    .venv/bin/python scripts/make_flight_golden.py
"""

import multiprocessing
import os
import pathlib
import tempfile
import time

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests/data/golden/pytorch_flight"


def run(rank: int, store: str, done) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace_json

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(4, 3))
    dist.all_gather([torch.empty(5, dtype=torch.bfloat16) for _ in range(2)], torch.ones(5, dtype=torch.bfloat16))
    if rank == 0:
        work = dist.all_reduce(torch.ones(7), async_op=True)
        time.sleep(1)
        assert not work.is_completed()
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"rank_{rank}.json").write_bytes(_dump_fr_trace_json(True, False))
    done.wait()
    os._exit(0)


def main() -> None:
    context = multiprocessing.get_context("spawn")
    done = context.Barrier(2)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run, args=(rank, f"{folder}/store", done)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            assert process.exitcode == 0


if __name__ == "__main__":
    main()
