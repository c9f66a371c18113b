#!/usr/bin/env python3
"""Runs scripts/skipped_tests.py on made-up results: check_skipped_tests.py SOURCE_DIR"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

TEST = '<testcase name="{name}" classname="{name}" time="1" status="{status}">{skipped}<properties/><system-out>{output}</system-out></testcase>'
ENOUGH = [
    ("unit.core", "run", "[  PASSED  ] 3 tests."),
    ("distributed.fsdp.2_ranks.cuda", "notrun", "on_gpu.sh: skipped: something"),
    ("distributed.dtensor_test.2_ranks", "run", "[rank 0] /src/dtensor_test.cpp:80: Skipped\n[rank 0] needs 4 ranks\n[rank 0] \n"),
    ("unit.dist", "run", "/src/device_test.cpp:31: Skipped\nno GPU is visible\n\n"),
]
LACKING = [
    ("nightly.transformers", "notrun", "some line\ncheck_transformers: skipped: it can't be installed"),
    ("unit.dist", "run", "/src/device_test.cpp:31: Skipped\nno GPU is visible\n\n/src/device_test.cpp:54: Skipped\nthe plugin isn't built\n\n"),
    ("e2e.Init.UnderTorchrun", "notrun", "/src/launch_test.cpp:204: Skipped\nno torchrun in .venv\n\n[  SKIPPED ] Init.UnderTorchrun (0 ms)"),
]


def run(script: pathlib.Path, tests: list[tuple[str, str, str]], no_skips: str) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder) / "results.xml"
        cases = [TEST.format(name=n, status=s, output=o, skipped="<skipped/>" if s == "notrun" else "") for n, s, o in tests]
        results.write_text("<testsuite>" + "".join(cases) + "</testsuite>")
        environment = {**os.environ, "TITAN_NO_SKIPS": no_skips}
        done = subprocess.run([sys.executable, script, results], env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout


def main() -> int:
    script = pathlib.Path(sys.argv[1]) / "scripts/skipped_tests.py"
    status, text = run(script, ENOUGH, no_skips="1")
    assert status == 0 and text.startswith("3 skipped because they need a GPU") and "lacks" not in text, (status, text)
    for no_skips in ("", "1"):
        status, text = run(script, LACKING, no_skips)
        assert status == int(no_skips == "1"), (status, text)
        assert "3 skipped because this machine lacks something" in text, text
        for line in ("nightly.transformers: check_transformers: skipped: it can't be installed", "unit.dist: device_test.cpp:54: the plugin isn't built",
                     "e2e.Init.UnderTorchrun: launch_test.cpp:204: no torchrun in .venv"):
            assert line in text, (line, text)
    status, text = run(script, ENOUGH + [("unit.dist.virtual", "run", "/src/device_test.cpp:31: Skipped\nno GPU is visible\n\n")], no_skips="")
    assert status == 1 and "unit.dist.virtual: device_test.cpp:31" in text, (status, text)
    status, text = run(script, ENOUGH + [("nightly.x.virtual", "run", "/src/x_test.cpp:3: Skipped\nneeds 4 ranks\n\n[rank 0] [  PASSED  ] 0 tests.\n")], no_skips="")
    assert status == 1 and "nightly.x.virtual: all cases are skipped" in text, (status, text)
    # As in CI (.ci/run).
    not_built = ("virtual_gpu.is_built", "notrun", "no test on virtual GPUs: nvcc, or a PyTorch with CUDA, is missing")
    for no_skips in ("", "virtual_gpu.is_built", "1"):
        status, text = run(script, LACKING + [not_built], no_skips)
        assert status == int(no_skips != ""), (no_skips, text)
        assert "  virtual_gpu.is_built: no test on virtual GPUs" in text, text
    status, text = run(script, ENOUGH, no_skips="virtual_gpu.is_built")
    assert status == 1 and "virtual_gpu.is_built: isn't among the tests" in text, (status, text)
    named = re.search(r"TITAN_NO_SKIPS:-([\w.]+)", (pathlib.Path(sys.argv[1]) / ".ci/run").read_text())
    assert named and named.group(1) == "virtual_gpu.is_built"
    return 0


if __name__ == "__main__":
    sys.exit(main())
