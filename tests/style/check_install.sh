#!/usr/bin/env bash
# Installs into an empty folder, builds docs/examples/custom_trainer against it, and runs it with one and two ranks: the loss falls, and
# both runs have the same curve. Then three ranks resume from what two have saved. check_install.sh BUILD_DIR SOURCE_DIR [COMMAND...]: with a COMMAND
# (at night; `env` if nothing is needed), the programs run through it, and docs/examples/custom_model is built against it, too, which takes as long to compile again; its model is
# trained as a shared object and as a program.
set -euo pipefail
build=$1
source=$2
run=("${@:3}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cmake --install "$build" --prefix "$folder/prefix" >"$folder/install.log"
# Virtual GPUs don't ship: nothing has a name or a symbol of theirs, or needs the libraries that only they have.
for library in "$build"/virtual_gpu/lib*; do
  [ ! -e "$library" ] || find "$folder/prefix" -name "${library##*/}"
done >"$folder/virtual"
grep -rl virtual_gpu "$folder/prefix" >>"$folder/virtual" || true
find "$folder/prefix" -type f -exec readelf -d {} + 2>"$folder/no_elf" | grep -E "NEEDED.*\[lib(kernels|c_library|titan_kernels)\.so\]" >>"$folder/virtual" || true
[ ! -s "$folder/virtual" ] || { echo "parts of virtual GPUs are installed, or needed:" >&2; cat "$folder/virtual" >&2; exit 1; }
[ "$(wc -l <"$source/docs/examples/custom_trainer/main.cpp")" -le 80 ] || { echo "the example has grown over 80 lines" >&2; exit 1; }
cmake -S "$source/docs/examples/custom_trainer" -B "$folder/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O0 -DNDEBUG" -DCMAKE_PREFIX_PATH="$folder/prefix" >"$folder/configure.log" || { cat "$folder/configure.log" >&2; exit 1; }
cmake --build "$folder/build"
VIRTUAL_GPU_COUNTERS=$folder/launches "${run[@]}" "$folder/build/custom_trainer" "$folder/steps_of_one" | tee "$folder/one"
[[ ${run[*]} != *virtual_gpus* ]] || grep -q aten::addmm "$folder/launches" || { echo "the installed library didn't train on the virtual GPU" >&2; exit 1; }
"${run[@]}" "$folder/prefix/bin/titan" launch -n 2 -- "$folder/build/custom_trainer" "$folder/steps_of_two" | tee "$folder/two"
"${run[@]}" "$folder/prefix/bin/titan" launch -n 3 -- "$folder/build/custom_trainer" "$folder/steps_of_two" | tee "$folder/three"
python3 - "$folder/one" "$folder/two" "$folder/three" <<'PY'
import re, sys
one, two, three = ([float(x) for x in re.findall(r"loss ([0-9.]+)", open(path).read())] for path in sys.argv[1:])
assert len(three) == 1 and abs(three[0] - one[-1]) <= 1e-4 * one[-1], f"resuming after step 40: {one} {three}"
assert len(one) == len(two) == 5, (one, two)
assert one[-1] < 0.8 * one[0], f"the loss didn't fall: {one}"
assert all(abs(a - b) <= 1e-4 * abs(a) for a, b in zip(one, two)), f"two ranks differ: {one} {two}"
PY

[ ${#run[@]} != 0 ] || exit 0
cmake -S "$source/docs/examples/custom_model" -B "$folder/model" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O0 -DNDEBUG" -DCMAKE_PREFIX_PATH="$folder/prefix" >"$folder/configure.log" || { cat "$folder/configure.log" >&2; exit 1; }
cmake --build "$folder/model" --target ngram
cd "$source"
"${run[@]}" "$folder/prefix/bin/titan" train docs/examples/custom_model/ngram.toml --experimental.custom_import "$folder/model/libngram.so" --training.steps 2 --job.dump_folder "$folder/module_run"
cmake --build "$folder/model"
"${run[@]}" "$folder/model/ngram_titan" train docs/examples/custom_model/ngram.toml --training.steps 2 --job.dump_folder "$folder/program_run"
