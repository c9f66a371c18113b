"""wandb_offline_test.py SCRIPT: what scripts/wandb_offline.py passes to the wandb package, as recorded by a stand-in, and its
messages if the package or the run is missing."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

STAND_IN = """
import json, os
class Run:
    def __init__(self, **arguments):
        self.dir = os.path.join(arguments["dir"], "wandb", "offline-run-1", "files")
        self.told = {"init": arguments, "log": []}
    def log(self, values, step):
        self.told["log"].append([step, values])
    def finish(self):
        json.dump(self.told, open(os.environ["TOLD"], "w"))
def init(**arguments):
    return Run(**arguments)
"""

script = sys.argv[1]
kept = tempfile.TemporaryDirectory()  # removed at the end
folder = pathlib.Path(kept.name)
run = folder / "my_run"
run.mkdir()
(run / "config.toml").write_text('[job]\ndescription = "größer"\n[optimizer]\nlr = 0.001\n[model.args]\n# dim: unset\nn_layers = 2\n', encoding="utf-8")
(run / "metrics.jsonl").write_text('{"step": 1, "loss": 3.5, "grad_norm": null, "tps": 10}\n{"step": 2, "loss": 3.25, "tps": 20, "memory_percent": 4.5, "step_s": 0.5, "data_loading_s": 0.125, "skipped_steps": 1, "startup_s": 2.5, "active_gib": 1.5, "active_percent": 2, "alloc_retries": 3, "num_ooms": 0}\n{"step": 3, "lo')
(run / "validation.jsonl").write_text('{"step": 2, "loss": 3.75, "tps": 5, "memory_percent": 4.75}\n')


def call(*words, packages=None, **variables):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "PYTHON"))}
    # In a C locale Python would read text as ASCII.
    environment.update(variables, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", TOLD=str(folder / "told.json"))
    if packages:
        environment["PYTHONPATH"] = str(packages)
    return subprocess.run([sys.executable, script, *words], capture_output=True, text=True, env=environment)


packages = folder / "packages"
packages.mkdir()
(packages / "wandb.py").write_text(STAND_IN)
done = call(str(run), packages=packages, WANDB_PROJECT="p", WANDB_TEAM="t", WANDB_RUN_TAGS="a,b")
assert done.returncode == 0, done.stderr
told = json.load(open(folder / "told.json"))
init = told["init"]
assert init["mode"] == "offline" and init["project"] == "p" and init["entity"] == "t" and init["tags"] == ["a", "b"], init
assert init["name"] == "my_run" and init["dir"] == str(run), init
assert init["config"] == {"job": {"description": "größer"}, "optimizer": {"lr": 0.001}, "model": {"args": {"n_layers": 2}}}, init
assert told["log"] == [
    [1, {"loss_metrics/global_avg_loss": 3.5, "throughput(tps)": 10}],
    [2, {"loss_metrics/global_avg_loss": 3.25, "throughput(tps)": 20, "memory/max_reserved(%)": 4.5, "time_metrics/end_to_end(s)": 0.5,
         "time_metrics/data_loading(s)": 0.125, "time_metrics/data_loading(%)": 25.0, "skipped_steps": 1, "startup_s": 2.5,
         "memory/max_active(GiB)": 1.5, "memory/max_active(%)": 2, "memory/num_alloc_retries": 3, "memory/num_ooms": 0,
         "validation_metrics/loss": 3.75, "validation_metrics/throughput(tps)": 5, "validation_metrics/memory/max_reserved(%)": 4.75}],
], told["log"]

(packages / "wandb.py").write_text("raise ImportError('none')\n")
missing = call(str(run), packages=packages)
assert missing.returncode == 1 and "pip install wandb" in missing.stderr, missing.stderr
none = call(str(folder / "nothing"), packages=packages)
assert none.returncode == 1 and "contains no run" in none.stderr, none.stderr
print("wandb gets the right values")
