#!/usr/bin/env python3
"""composition_fuzz.py reports what goes wrong: it is given programs that behave like titan on one rank, and wrongly on several.

    composition_fuzz_test.py composition_fuzz.py titan
"""

import importlib.util
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

SCRIPT, TITAN = sys.argv[1:3]
SPEC = importlib.util.spec_from_file_location("composition_fuzz", SCRIPT)
FUZZ = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(FUZZ)

# Lines of shell that train, and then change a file in the run's folder.
AFTER_TRAINING = '''"$titan" "$@" || exit
for word; do case $word in --job.dump_folder=*) cd "${word#*=}";; esac; done
'''


class CompositionFuzz(unittest.TestCase):
    def fuzz(self, on_several_ranks, *words):
        """Runs a layout of a `titan` that runs these lines of shell instead if it has several ranks. Returns exit code, output and counts."""
        with tempfile.TemporaryDirectory() as folder:
            titan, counts = pathlib.Path(folder, "titan"), pathlib.Path(folder, "counts.json")
            titan.write_text(f'#!/bin/sh\ntitan="{TITAN}"\ncase " $* " in *" --nproc "*)\n{on_several_ranks}\n;; esac\nexec "$titan" "$@"\n')
            titan.chmod(0o700)
            small = "44" if "--resumes" in words else "32"  # on two ranks
            command = [sys.executable, SCRIPT, "--titan", titan, "--seed", "1", "--only", small, "--limit", "120", "--json", counts, *words]
            process = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600)
            return process.returncode, process.stdout + process.stderr, json.loads(counts.read_text())

    def expect_failures(self, outcome, what):
        code, output, counts = outcome
        self.assertEqual(code, 1, output)
        self.assertEqual(len(counts["failed"]), 1, output)
        self.assertIn(what, output)
        self.assertIn("repeat it with --seed 1", output)

    def test_accepts_equal_runs(self):
        for words in ((), ("--resumes",)):
            code, output, counts = self.fuzz("", *words)
            self.assertEqual((code, counts["compared"], counts["failed"]), (0, 1, []), output)

    def test_finds_another_gradient_norm(self):
        self.expect_failures(self.fuzz('exec "$titan" "$@" --loss.name=z_loss --loss.args.z_weight=0.02'), "differs from one rank")

    def test_finds_another_update_of_the_last_step(self):
        self.expect_failures(self.fuzz('exec "$titan" "$@" --optimizer.param_groups="norm: lr=0.0101"'), "differs from one rank")

    def test_finds_a_run_that_resumes_with_another_state(self):
        outcome = self.fuzz('exec "$titan" "$@" --checkpoint.exclude_from_loading=dataloader', "--resumes")
        self.expect_failures(outcome, "differs from one rank")

    def test_finds_a_crash(self):
        self.expect_failures(self.fuzz("echo gone; exit 3"), "exit code 3\ngone")

    def test_finds_a_refusal_by_ranks(self):
        self.expect_failures(self.fuzz("echo '[rank 0] titan: no'; exit 2"), "refused only after ranks had started")

    def test_finds_a_run_that_does_not_end(self):
        self.expect_failures(self.fuzz("exec sleep 100", "--limit", "3"), "hangs")

    def test_finds_a_loss_that_is_not_finite(self):
        null_losses = """sed -i 's/"loss":[^,}]*/"loss":null/' metrics.jsonl; exit"""
        self.expect_failures(self.fuzz(AFTER_TRAINING + null_losses), "differs from one rank: loss inf")

    def test_finds_a_damaged_file(self):
        outcome = self.fuzz(AFTER_TRAINING + ": > $(find . -name model.safetensors); exit")
        self.expect_failures(outcome, "error: unpack requires")

    def test_all_that_wait_for_a_run_on_one_rank_learn_of_its_error(self):
        class Program:
            def run(self, settings, name):
                raise struct.error("damaged")

        references = FUZZ.References(Program(), 3)
        for _ in range(2):
            with self.assertRaisesRegex(FUZZ.Failure, "error: damaged"):
                references.get("problem", {"training.global_batch_size": 8})

    def test_says_how_many_layouts_were_not_drawn(self):
        code, output, counts = self.fuzz("", "--minutes", "0")
        self.assertEqual((code, counts["layouts"], counts["not_drawn"]), (1, 0, 1), output)
        self.assertIn("cut short by --minutes: 1 more layouts were not drawn", output)

    def test_fails_if_fewer_than_half_have_three_parallel_axes(self):
        for few, is_failed in ((50, False), (51, True)):
            report = FUZZ.Report(100, "")
            for number in range(100):
                axes = [["dp_shard", "tp", "ac"] if number < few else ["dp_shard", "tp", "pp"]]
                report.add({"precision": "float64", "axes": axes, "schedules": ["GPipe"], "differences": {"loss": 0, "norm": 0, "parameter": 0}})
            self.assertEqual(FUZZ.is_failed(report.summary()), is_failed)

    def test_draws_three_parallel_axes_more_often_than_not(self):
        for resumes in (False, True):
            drawn = [axes for number in range(1, 401) for axes in FUZZ.Case(1, number, resumes).axes]
            dense = [axes for axes in drawn if sum(axis in FUZZ.PARALLEL_AXES for axis in axes) >= 3]
            self.assertGreater(len(dense) / len(drawn), 0.6)

    def test_runs_as_a_command(self):
        self.assertTrue(os.access(SCRIPT, os.X_OK))

    def test_fails_if_everything_is_refused(self):
        code, output, counts = self.fuzz("echo 'titan: expected 1 to 3, got 7'; exit 2")
        self.assertEqual((code, counts["failed"], counts["refused"]), (1, [], {"expected N to N, got N": 1}), output)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
