#!/usr/bin/env bash
# Compares logits with Hugging Face's transformers (tests/hugging_face/transformers_test.py), which it installs into .venv if
# necessary. If it can't be installed, the script says so and exits with status 77.
#   scripts/check_transformers.sh [build]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
python=.venv/bin/python
package=transformers==5.23.0

skip() { echo "check_transformers: skipped: $1"; exit 77; }

[ -x "$python" ] || skip "there is no $python: run scripts/bootstrap.sh"
if ! "$python" -c 'import torch' 2>/dev/null; then skip "$python has no torch"; fi
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("transformers") and u.find_spec("safetensors")))'; then
  log=$(timeout 150 "$python" -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 10 "$package" 2>&1) ||
    skip "$package can't be installed: $(tail -n 1 <<<"$log")"
fi
exec "$python" tests/hugging_face/transformers_test.py "$build/bin/titan" "$build/bin/hf_logits"
