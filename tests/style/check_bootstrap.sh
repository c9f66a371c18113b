#!/usr/bin/env bash
# check_bootstrap.sh SOURCE_FOLDER: on a machine that is set up, scripts/bootstrap.sh changes nothing and ends within 3 s.
set -euo pipefail
cd "$1"
if [ -z "${TITAN_TORCH_DIR:-}" ] && [ ! -e .venv/.complete ]; then
  echo "not set up by scripts/bootstrap.sh"
  exit 77
fi
# A test must not install anything.
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
for tool in apt-get sudo; do
  printf '#!/bin/sh\necho "%s was called: $*" >&2\nexit 1\n' $tool >"$tools/$tool"
  chmod +x "$tools/$tool"
done

start=$(date +%s%N)
output=$(PATH="$tools:$PATH" scripts/bootstrap.sh 2>&1) || true
took_ms=$((($(date +%s%N) - start) / 1000000))
echo "took $took_ms ms"
[ -z "$output" ] || { echo "the second bootstrap still did something: $output"; exit 1; }
[ "$took_ms" -le 3000 ]
