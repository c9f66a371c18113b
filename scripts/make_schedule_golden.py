#!/usr/bin/env python3
"""Writes tests/data/schedules/*.csv: PyTorch's pipeline schedules, action for action, for the tests that compare LibTitan's with them.

    .venv/bin/python scripts/make_schedule_golden.py

File names: <schedule>_<ranks>x<stages>x<micro-batches>.csv. PyTorch has schedules with one stage per rank only as code that runs them, so
this script runs that code on a stage that records its actions. complete_*.csv also contain the actions that PyTorch adds: sends, receives and parameter actions."""

import csv
import pathlib

from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "schedules"

SINGLE = {"GPipe": torch_schedules.ScheduleGPipe, "1F1B": torch_schedules.Schedule1F1B}
MULTI = {
    "Interleaved1F1B": torch_schedules.ScheduleInterleaved1F1B,
    "LoopedBFS": torch_schedules.ScheduleLoopedBFS,
    "InterleavedZeroBubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": torch_schedules.ScheduleZBVZeroBubble,
    "DualPipeV": torch_schedules.ScheduleDualPipeV,
}
# Ranks, stages, micro-batches.
SIZES = {
    "GPipe": [(1, 1, 3), (2, 2, 5), (4, 4, 8)],
    "1F1B": [(1, 1, 2), (2, 2, 2), (4, 4, 5), (4, 4, 8)],
    "Interleaved1F1B": [(2, 4, 1), (2, 4, 3), (2, 6, 4), (4, 8, 8), (4, 8, 10), (3, 12, 8)],
    "LoopedBFS": [(2, 4, 3), (4, 8, 8)],
    "InterleavedZeroBubble": [(2, 4, 3), (2, 6, 4), (4, 8, 8), (4, 8, 10), (3, 12, 8)],
    "ZBVZeroBubble": [(1, 2, 2), (2, 4, 1), (2, 4, 5), (4, 8, 4), (4, 8, 8), (3, 6, 11)],
    "DualPipeV": [(1, 2, 2), (2, 4, 4), (2, 4, 7), (3, 6, 6), (4, 8, 8), (4, 8, 11), (5, 10, 12)],
}
COMPLETE = [("Interleaved1F1B", 2, 4, 4), ("Interleaved1F1B", 2, 8, 4), ("ZBVZeroBubble", 2, 4, 4), ("DualPipeV", 2, 4, 4)]


class RecordingStage:
    """Stands in for a stage: records the actions that it is asked to perform."""

    def __init__(self, index: int):
        self.stage_index, self.actions = index, []
        self.has_backward = True

    def forward_one_chunk(self, micro_batch, *_args, **_options):
        self.actions.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch, **_options):
        self.actions.append(f"{self.stage_index}B{micro_batch}")

    def perform_reduce_grad(self, _factor):
        pass

    def _no_messages(self, _micro_batch):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_messages


def single_stage_rows(kind: type, ranks: int, micro_batches: int) -> list[list[str]]:
    class Recorded(kind):
        def __init__(self, stage):  # without a process group
            self._stage, self._n_microbatches, self._num_stages = stage, micro_batches, ranks
            self._stages_forward_initialized = self._stages_backward_initialized = True
            self._has_backward, self.scale_grads = True, False

        def _check_inputs(self, *_inputs):
            return [()] * micro_batches, [{}] * micro_batches

        def _initialize_stage(self, *_inputs):
            pass

        def _maybe_compute_loss(self, *_inputs):
            pass

        def _maybe_get_loss(self, *_inputs):
            return None

        def _update_losses(self, *_inputs):
            pass

    rows = []
    for rank in range(ranks):
        stage = RecordingStage(rank)
        Recorded(stage)._step_microbatches()
        rows.append(stage.actions)
    return rows


def multi_stage_orders(kind: type, ranks: int, stages: int, micro_batches: int) -> dict:
    schedule = kind.__new__(kind)
    schedule.pp_group_size, schedule.n_local_stages, schedule.num_stages = ranks, stages // ranks, stages
    schedule._num_stages, schedule._n_microbatches, schedule._stages = stages, micro_batches, [None] * (stages // ranks)
    schedule.number_of_rounds = max(1, micro_batches // ranks)
    schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
    return {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}


def complete_rows(name: str, ranks: int, stages: int, micro_batches: int) -> dict:
    orders = multi_stage_orders(MULTI[name], ranks, stages, micro_batches)
    rank_of_stage = generate_stage_to_rank_mapping(ranks, stages, style="v" if name in ("ZBVZeroBubble", "DualPipeV") else "loop")
    lowered = {}
    for rank, order in orders.items():
        lowered[rank] = torch_schedules._add_reduce_grad(torch_schedules._add_unshard_reshard(order), micro_batches)
    return torch_schedules._add_send_recv(lowered, stage_to_rank=lambda stage: rank_of_stage[stage], num_stages=stages)


def write(file_name: str, rows) -> None:
    with open(FOLDER / file_name, "w", newline="") as file:
        csv.writer(file).writerows(rows)  # as PyTorch writes them


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, sizes in SIZES.items():
        for ranks, stages, micro_batches in sizes:
            if name in SINGLE:
                rows = single_stage_rows(SINGLE[name], ranks, micro_batches)
            else:
                rows = multi_stage_orders(MULTI[name], ranks, stages, micro_batches).values()
            write(f"{name}_{ranks}x{stages}x{micro_batches}.csv", rows)
    for name, ranks, stages, micro_batches in COMPLETE:
        write(f"complete_{name}_{ranks}x{stages}x{micro_batches}.csv", complete_rows(name, ranks, stages, micro_batches).values())


if __name__ == "__main__":
    main()
