#!/usr/bin/env bash
# first_command_test.sh FOLDER: README's first command on two virtual GPUs.
set -euo pipefail
cd "$(dirname "$0")/../.."
scripts/virtual_gpus.sh 2 -- scripts/train.sh configs/llama3_debug.toml --job.dump_folder="$1" 2>&1 | tee "$1.log"
for line in '2 rank(s) of cuda:0 over nccl' 'step: 60 ' 'training completed'; do
  grep -qF "$line" "$1.log" || { echo "there is no line with: $line" >&2; exit 1; }
done
