#!/usr/bin/env bash
# fuzz.sh [--build | --run] [--seconds N] [--seed N] [NAME...]: the fuzzers of tests/fuzz (libFuzzer under AddressSanitizer and
# UndefinedBehaviorSanitizer), built in build-fuzz, then run for 30 s each, as many at a time as there are processors.
#   scripts/fuzz.sh                                all
#   scripts/fuzz.sh --seconds 3600 npy manifest    two of them, an hour each
#   scripts/fuzz.sh --build                        builds only; --run runs only
# Inputs that reach new code are kept in build-fuzz/corpus/NAME, findings in build-fuzz/found; build-fuzz/bin/NAME_fuzz FILE
# runs one again. Exit status 77 if clang can't be installed.
set -euo pipefail
cd "$(dirname "$0")/.."

# The last package names functions in reports.
packages=(clang-14 libclang-rt-14-dev llvm-14)
build=true run=true seconds=30 seed=0

say() { printf 'fuzz: %s\n' "$*" >&2; }
source scripts/packages.sh

while [ $# -gt 0 ]; do
  case $1 in
    --build) run=false ;;
    --run) build=false ;;
    --seconds | --seed) declare "${1#--}=$2"; shift ;;
    -*) sed -n '2,8s/^# //p' "$0" >&2; exit 2 ;;
    *) break ;;
  esac
  shift
done
if [ $# -eq 0 ]; then
  mapfile -t names < <(basename -s _fuzz.cpp tests/fuzz/*_fuzz.cpp)
else
  names=("$@")
fi

build_fuzzers() {
  scripts/bootstrap.sh
  if ! install_packages "${packages[@]}"; then
    say "skipped: ${packages[*]} can't be installed"
    exit 77
  fi
  mkdir -p build-fuzz
  exec 9>build-fuzz/.lock
  flock 9
  [ -e build-fuzz/build.ninja ] && [ ! CMakePresets.json -nt build-fuzz/build.ninja ] || cmake --preset fuzz >/dev/null
  cmake --build --preset fuzz --parallel "${TITAN_BUILD_JOBS:-$(nproc)}" >&2
  exec 9>&-
}

# Prints the whole report of a finding, or one line for a run without one.
run_fuzzer() {
  local name=$1 program=build-fuzz/bin/$1_fuzz dictionary=tests/fuzz/dictionaries/$1.dict log=build-fuzz/$1.log
  if [ ! -x "$program" ]; then
    say "skipped: there is no $program (scripts/fuzz.sh --build)"
    return 77
  fi
  mkdir -p "build-fuzz/corpus/$name" build-fuzz/found
  local options=(-max_total_time="$seconds" -seed="$seed" -timeout=20 -rss_limit_mb=1024 -print_final_stats=1
                 -artifact_prefix="build-fuzz/found/$name-")
  [ ! -e "$dictionary" ] || options+=(-dict="$dictionary")
  if ! ASAN_OPTIONS=quarantine_size_mb=32 UBSAN_OPTIONS=print_stacktrace=1 \
    "$program" "${options[@]}" "build-fuzz/corpus/$name" "tests/fuzz/corpus/$name" >"$log" 2>&1; then
    tail -n 120 "$log"
    say "$name: failed, see above"
    return 1
  fi
  awk -v name="$name" '/ cov: /{for (i = 1; i < NF; ++i) if ($i == "cov:") covered = $(i + 1)}
    /number_of_executed_units/ {units = $2} /peak_rss_mb/ {memory = $2}
    END {printf "fuzz: %s: %d inputs, %d places reached, at most %d MiB\n", name, units, covered, memory}' "$log"
}

if $build; then build_fuzzers; fi
if $run; then
  if [ ${#names[@]} -eq 1 ]; then
    run_fuzzer "${names[0]}"
  else
    printf '%s\n' "${names[@]}" | xargs -n 1 -P "$(nproc)" scripts/fuzz.sh --run --seconds "$seconds" --seed "$seed"
  fi
fi
