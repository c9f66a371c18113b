#!/usr/bin/env python3
"""composition_fuzz.py reports what goes wrong: it is given programs that behave like titan on one rank, and wrongly on several.

    composition_fuzz_test.py composition_fuzz.py titan
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT, TITAN = sys.argv[1:3]


class CompositionFuzz(unittest.TestCase):
    def fuzz(self, on_several_ranks, *words):
        """Runs a layout of a `titan` that runs these lines of shell instead if it has several ranks. Returns exit code, output and counts."""
        with tempfile.TemporaryDirectory() as folder:
            titan, counts = pathlib.Path(folder, "titan"), pathlib.Path(folder, "counts.json")
            titan.write_text(f'#!/bin/sh\ntitan="{TITAN}"\ncase " $* " in *" --nproc "*)\n{on_several_ranks}\n;; esac\nexec "$titan" "$@"\n')
            titan.chmod(0o700)
            small = "44" if "--resumes" in words else "32"  # on two ranks
            command = [sys.executable, SCRIPT, "--titan", titan, "--seed", "1", "--only", small, "--json", counts, *words]
            process = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=800)
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

    def test_fails_if_everything_is_refused(self):
        code, output, counts = self.fuzz("echo 'titan: expected 1 to 3, got 7'; exit 2")
        self.assertEqual((code, counts["failed"], counts["refused"]), (1, [], {"expected N to N, got N": 1}), output)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
