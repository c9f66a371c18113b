#!/usr/bin/env bash
# report_in_chromium_test.sh TITAN [SCREENSHOT_FOLDER]: `titan report`'s page in a headless Chromium, without a network, light and dark:
# the script runs without an error, all sections are drawn, and the picture isn't empty. Also `titan plan`'s picture of streams and memory. Skipped (exit 77) where there is no Chromium
# and it can't be installed.
set -euo pipefail
titan=$1
source_folder=$(cd "$(dirname "$0")/../.." && pwd)
say() { printf 'report_in_chromium: %s\n' "$*" >&2; }
source "$source_folder/scripts/packages.sh"
command -v python3 >/dev/null || { echo "there is no python3: skipped"; exit 77; }

find_chromium() {
  local name
  for name in chromium chromium-browser google-chrome google-chrome-stable; do command -v "$name" && return; done
  return 1
}
if ! chromium=$(find_chromium); then
  export -f install_packages missing_packages as_root say
  timeout 120 bash -c 'install_packages chromium' >&2 || true
  chromium=$(find_chromium) || { echo "there is no Chromium, and it can't be installed: skipped"; exit 77; }
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pictures=${2:-$work}
mkdir -p "$pictures"
cat >"$work/config.toml" <<'TOML'
[job]
description = "A small Llama, two ranks, resumed once"
[model]
hf_assets_path = "bytes"
[model.args]
dim = 64
n_layers = 2
n_heads = 4
n_kv_heads = 2
vocab_size = 258
multiple_of = 32
[training]
device = "cpu"
dataset = "text"
global_batch_size = 4
seq_len = 64
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 10
total_steps = 80
[metrics]
log_freq = 2
[checkpoint]
enable = true
interval = 20
last_save_model_only = false
[validation]
enable = true
dataset = "text"
seq_len = 64
freq = 10
steps = 2
TOML
mkdir "$work/text"
cp "$source_folder"/docs/*.md "$work/text"  # somebody may be writing there
for steps in 40 80; do
  "$titan" train "$work/config.toml" --nproc 2 --job.dump_folder "$work/run" --training.steps $steps \
    --training.dataset_path "$work/text/*.md" --validation.dataset_path "$work/text/operations.md" 2>"$work/train.log" ||
    { cat "$work/train.log"; exit 1; }
done
"$titan" report "$work/run"

# The page reports on its script in attributes that the DOM dump shows: errors, recorded from before any other script runs; and, once all is
# loaded, how many charts show values under a pointer that is moved over them. There is no network, so no name can be resolved.
watch() {
  python3 - "$1" "$2" <<'PY'
import sys

page = open(sys.argv[1], encoding="utf-8").read()
note = """<script>
const problems = [], note = text => { problems.push(String(text)); document.documentElement.dataset.problems = problems.join("; "); };
addEventListener("error", event => note(event.message || "something wasn't loaded"), true);
addEventListener("unhandledrejection", event => note(event.reason));
console.error = console.warn = (...words) => note(words.join(" "));
addEventListener("load", () => {
  const charts = [...document.querySelectorAll("figure.chart")];
  const shows = chart => {
    const svg = chart.querySelector("svg"), tip = chart.querySelector(".tip"), box = svg.getBoundingClientRect(), values = new Set();
    for (const part of [0.2, 0.5, 0.9]) {
      svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + part * box.width, clientY: box.top + box.height / 2 }));
      if (tip.style.display === "block" && /^step [0-9,]+/.test(tip.textContent) && tip.children.length > 1) values.add(tip.textContent);
    }
    svg.dispatchEvent(new PointerEvent("pointerleave"));
    return values.size > 1 && tip.style.display === "none";
  };
  const drawn = chart => [...chart.querySelectorAll("path.line, circle.dot, rect.bar")].some(shape => {
    const box = shape.getBBox();
    return box.width > 0 && (box.height > 0 || shape.matches(".line")) && getComputedStyle(shape).visibility === "visible";
  });
  Object.assign(document.documentElement.dataset, {
    charts: charts.length, shows: charts.filter(shows).length, drawn: charts.filter(drawn).length });
});
</script>"""
assert page.count("<head>") == 1
open(sys.argv[2], "w", encoding="utf-8").write(page.replace("<head>", "<head>" + note))
PY
}
watch "$work/run/report.html" "$work/watched.html"
# The test itself has to detect a script that fails, and one that doesn't parse.
sed 's|const series = JSON.parse(|const series = JSON.parsed(|' "$work/run/report.html" >"$work/failing.html"
sed 's|const nearest = |const const nearest = |' "$work/run/report.html" >"$work/unparsed.html"
for broken in failing unparsed; do
  ! cmp -s "$work/$broken.html" "$work/run/report.html" || { echo "$broken.html is the page itself"; exit 1; }
  watch "$work/$broken.html" "$work/$broken.watched.html"
done
browse() {
  timeout 100 "$chromium" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir="$work/profile" \
    --host-resolver-rules="MAP * ~NOTFOUND" --virtual-time-budget=2000 "$@" 2>>"$work/chromium.log"
}
browse --dump-dom "file://$work/watched.html" >"$work/dom.html" || { cat "$work/chromium.log"; exit 1; }
for broken in failing unparsed; do
  browse --dump-dom "file://$work/$broken.watched.html" >"$work/$broken.dom.html"
  grep -q 'data-problems="' "$work/$broken.dom.html" || { echo "the broken script ($broken) isn't detected"; exit 1; }
  grep -q 'data-shows="0"' "$work/$broken.dom.html" || { echo "charts of a broken script ($broken) show values"; exit 1; }
done
browse --window-size=1280,3000 --screenshot="$pictures/light.png" "file://$work/run/report.html" || { cat "$work/chromium.log"; exit 1; }
browse --window-size=1280,3000 --force-dark-mode --blink-settings=preferredColorScheme=0 --screenshot="$pictures/dark.png" "file://$work/run/report.html"
browse --window-size=420,1500 --screenshot="$pictures/narrow.png" "file://$work/run/report.html"
"$titan" plan "$source_folder/configs/llama3_debug.toml" --world 4 --parallelism.pipeline_parallel_degree 2 --svg "$work/plan.svg" >/dev/null
browse --window-size=1250,600 --screenshot="$pictures/plan.png" "file://$work/plan.svg"

python3 - "$work/dom.html" "$pictures" <<'PY'
import re, struct, sys, zlib

dom = open(sys.argv[1]).read()
told = {name: value for name, value in re.findall(r'data-(problems|charts|shows|drawn)="([^"]*)"', dom[:dom.index("<head>")])}
assert "problems" not in told, told
assert int(told["charts"]) >= 6 and told["shows"] == told["drawn"] == told["charts"], told
for section in ("overview", "charts", "time", "ranks", "validation", "checkpoints", "restarts", "configuration", "environment"):
    assert f'<section id="{section}">' in dom, section
assert dom.count("<figure class=\"chart\">") >= 6, dom.count("<figure")

def pixels(path, most_rows):
    """The first rows, of bytes, of an 8-bit PNG, without interlacing, as Chromium writes it."""
    data = open(path, "rb").read()
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert depth == 8 and kind in (2, 6), (depth, kind)
    size, at, packed = {2: 3, 6: 4}[kind], 8, b""
    while at < len(data):
        length, name = struct.unpack(">I4s", data[at:at + 8])
        if name == b"IDAT":
            packed += data[at + 8:at + 8 + length]
        at += length + 12
    raw, stride, rows, before = zlib.decompress(packed), width * size, [], bytes(width * size)
    for y in range(min(height, most_rows)):
        method, line = raw[y * (stride + 1)], bytearray(raw[y * (stride + 1) + 1:(y + 1) * (stride + 1)])
        for i in range(stride):
            left, up, corner = line[i - size] if i >= size else 0, before[i], before[i - size] if i >= size else 0
            if method == 1: line[i] = (line[i] + left) & 255
            elif method == 2: line[i] = (line[i] + up) & 255
            elif method == 3: line[i] = (line[i] + (left + up) // 2) & 255
            elif method == 4:
                estimate = left + up - corner
                line[i] = (line[i] + min((left, up, corner), key=lambda value: abs(estimate - value))) & 255
        rows.append(bytes(line))
        before = bytes(line)
    return rows, size

def colors(path, most_rows=900):
    rows, size = pixels(path, most_rows)
    return [row[i:i + 3] for row in rows[::4] for i in range(0, len(row), 4 * size)]

for name, blue in (("light", (0x1f, 0x5f, 0xd6)),):
    seen = colors(f"{sys.argv[2]}/{name}.png")
    assert len(set(seen)) > 100, (name, len(set(seen)))
    near = sum(max(abs(a - b) for a, b in zip(pixel, blue)) < 40 for pixel in seen)
    assert near > 20, (name, "no curve is visible", near)
light, dark = (sum(sum(pixel) for pixel in colors(f"{sys.argv[2]}/{name}.png", 400)) for name in ("light", "dark"))
assert dark < light / 2, "the dark page isn't dark"
seen = colors(f"{sys.argv[2]}/plan.png", 600)
for part, color in (("forward", "4477aa"), ("backward", "66ccee"), ("communication", "ccbb44"), ("optimizer states", "117733"), ("activations", "ddcc77")):
    assert seen.count(bytes.fromhex(color)) > 60, f"no {part} in the plan's picture beside the legend's"  # a legend's square is 9 of these pixels
print("the report is drawn, light and dark, and the plan's picture")
PY
