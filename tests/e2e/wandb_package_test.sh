#!/usr/bin/env bash
# wandb_package_test.sh PYTHON TITAN CONFIG IMPORT SCRIPT: SCRIPT (scripts/wandb_offline.py) turns a run's metrics into an offline run with the
# real package, and the package's own reader reads them back, value by value. It is installed beside TITAN's build the first time; where that
# fails, the test is skipped (exit 77).
set -euo pipefail
python=$1 titan=$2 config=$3 import=$4 script=$5
package=wandb==0.29.0 # the last that has a reader in Python
packages="$(dirname "$titan")/../wandb"
if ! PYTHONPATH="$packages" "$python" -c 'import wandb.sdk.internal.datastore' 2>/dev/null; then
  "$python" -m pip install -q --disable-pip-version-check --upgrade --target "$packages" "$package" ||
    { echo "the package $package can't be installed: skipped"; exit 77; }
fi
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
"$titan" train "$config" --experimental.custom_import "$import" --job.dump_folder "$run/out" --training.steps 4 --training.device cpu \
  --metrics.log_freq 1 --validation.enable --validation.freq 2 --validation.steps 1 --validation.seq_len 64

# A separate home folder and no server: offline mode needs no key and no network.
unset "${!WANDB_@}"
export HOME="$run/home" PYTHONPATH="$packages" https_proxy=http://127.0.0.1:9 http_proxy=http://127.0.0.1:9
mkdir "$HOME"
WANDB_PROJECT=our_project WANDB_TEAM=our_team WANDB_RUN_NAME=first WANDB_RUN_TAGS=a,b "$python" "$script" "$run/out" --output "$run/offline"
"$python" - "$run" <<'PY'
import glob, json, sys, tomllib
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore

NAMES = {"loss": "loss_metrics/global_avg_loss", "max_loss": "loss_metrics/global_max_loss", "grad_norm": "grad_norm", "lr": "lr",
         "tps": "throughput(tps)", "step_s": "time_metrics/end_to_end(s)", "data_loading_s": "time_metrics/data_loading(s)",
         "memory_gib": "memory/max_reserved(GiB)", "n_tokens_seen": "n_tokens_seen"}
VALIDATION_NAMES = {"loss": "validation_metrics/loss", "tps": "validation_metrics/throughput(tps)"}

folder = sys.argv[1]
(file,) = glob.glob(folder + "/offline/wandb/offline-run-*/run-*.wandb")
store = DataStore()
store.open_for_scan(file)
history, runs, exits = {}, [], []
while (data := store.scan_data()) is not None:
    record = Record.FromString(data)
    if record.WhichOneof("record_type") == "run":
        runs.append(record.run)
    elif record.WhichOneof("record_type") == "exit":
        exits.append(record.exit.exit_code)
    elif record.WhichOneof("record_type") == "history":
        values = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        history[values["_step"]] = values

read_rows = lambda name: [json.loads(line) for line in open(f"{folder}/out/{name}.jsonl")]
steps, validations = read_rows("metrics"), read_rows("validation")
assert sorted(history) == [row["step"] for row in steps] == [1, 2, 3, 4], sorted(history)
for rows, names in ((steps, NAMES), (validations, VALIDATION_NAMES)):
    for row in rows:
        found = {name: history[row["step"]][name] for name in names.values()}
        assert found == {name: row[key] for key, name in names.items()}, (row["step"], found)
assert {row["step"] for row in validations} == {step for step, values in history.items() if "validation_metrics/loss" in values}

run = runs[0]
assert (run.project, run.entity, run.display_name, list(run.tags)) == ("our_project", "our_team", "first", ["a", "b"]), run
written = tomllib.load(open(folder + "/out/config.toml", "rb"))
config = {item.key: json.loads(item.value_json) for record in runs for item in record.config.update}
assert {key: config[key] for key in written} == written and written["training"]["steps"] == 4, config
assert exits == [0], "the offline run has ended"
print("the wandb package reads", len(history), "steps of", len(NAMES) + len(VALIDATION_NAMES), "figures")
PY
