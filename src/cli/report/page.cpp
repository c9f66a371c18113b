// titan report: a run as one HTML page.

#include "cli/report/page.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "cli/checkpoint/commands.h"
#include "cli/parser.h"
#include "cli/text.h"
#include "core/file.h"
#include "core/process.h"
#include "job/job_config.h"
#include "titan/config/load.h"
#include "titan/core/error.h"

namespace titan::cli::report {

std::string escaped(std::string_view text) {
  std::string html;
  for (const char c : text) {
    if (c == '&')
      html += "&amp;";
    else if (c == '<')
      html += "&lt;";
    else if (c == '>')
      html += "&gt;";
    else if (c == '"')
      html += "&quot;";
    else
      html += c;
  }
  return html;
}

std::string to_html(const HtmlTable& table) {
  const auto cell = [&](const char* tag, size_t column, const std::string& text) {
    const bool number = column < table.numbers.size() && table.numbers[column];
    return str("<", tag, number ? " class=\"n\">" : ">", escaped(text), "</", tag, ">");
  };
  std::string html = "<div class=\"scroll\"><table><thead><tr>";
  for (size_t i = 0; i < table.heads.size(); ++i) html += cell("th", i, table.heads[i]);
  html += "</tr></thead><tbody>\n";
  for (size_t row = 0; row < table.rows.size(); ++row) {
    const bool has_class = row < table.row_classes.size() && !table.row_classes[row].empty();
    html += has_class ? str("<tr class=\"", table.row_classes[row], "\">") : std::string("<tr>");
    for (size_t i = 0; i < table.rows[row].size(); ++i) html += cell("td", i, table.rows[row][i]);
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

std::string paragraph(std::string_view text) { return str("<p>", escaped(text), "</p>\n"); }

std::string validation_section(const PageInput& input) {
  const MetricRows& rows = input.run.validations;
  if (rows.empty()) return paragraph("The run has no validations.");
  HtmlTable table{.heads = {"step", "loss", "tokens/s per device"}, .numbers = {true, true, true}};
  std::optional<size_t> best;
  for (size_t i = 0; i < rows.size(); ++i)
    if (const auto loss = rows.value(i, "loss"); loss && (!best || *loss < *rows.value(*best, "loss")))
      best = i;
  const size_t stride = (rows.size() + 39) / 40;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i % stride != 0 && i + 1 != rows.size() && i != best) continue;
    const auto loss = rows.value(i, "loss");
    table.rows.push_back({short_number(static_cast<double>(rows.step(i))),
                          loss ? number("%.5f", *loss) : "not finite",
                          short_number(std::round(rows.value(i, "tps").value_or(0)))});
    table.row_classes.push_back(i == best ? "changed" : "");
  }
  return paragraph("The best validation is marked.") + to_html(table);
}

namespace {

struct RunState {
  std::string css;
  std::string words;
};

RunState state_of(const PageInput& input) {
  const RunHistory& run = input.run;
  const int64_t last = run.steps.last_step(), total = run.total_steps();
  const std::string place =
      str("step ", short_number(static_cast<double>(last)), " of ", short_number(static_cast<double>(total)));
  if (run.processes.empty()) return last == total ? RunState{"good", "completed"} : RunState{"warn", place};
  const ProcessEnd end = end_of(run, run.processes.size() - 1, input.now_us);
  if (end.kind == ProcessEnd::Kind::Completed)
    return last == total ? RunState{"good", "completed"} : RunState{"good", "ended after " + place};
  if (end.kind == ProcessEnd::Kind::Stopped) return {"warn", str(end.words, " after ", place)};
  if (is_failed_restart(end, run.processes.back(), run))
    return {"good", "completed; a later start was ended by " + end.words};
  if (end.kind == ProcessEnd::Kind::Failed) return {"bad", "ended by " + end.words};
  return {"warn", str(end.words, ", ", place)};
}

std::string tile(const std::string& name, const std::string& value) {
  return str("<div class=\"tile\"><small>", escaped(name), "</small><b>", escaped(value), "</b></div>\n");
}

std::string figure_tile(const std::string& name, const std::optional<double>& value) {
  return value ? tile(name, short_number(*value)) : "";
}

std::optional<double> best_of(const Curve& curve) {
  if (curve.empty()) return std::nullopt;
  return std::ranges::min(curve, {}, [](const auto& point) { return point.second; }).second;
}

std::string overview_section(const PageInput& input) {
  const RunHistory& run = input.run;
  const RunState state = state_of(input);
  std::string tiles = figure_tile("steps", static_cast<double>(run.steps.last_step()));
  tiles += figure_tile("last loss", run.steps.last("loss"));
  tiles += figure_tile("best validation loss", best_of(run.validations.curve("loss")));
  tiles += figure_tile("tokens seen", run.steps.last("n_tokens_seen"));
  tiles += figure_tile("tokens/s per device (median)", median_after_first(run.steps.curve("tps")));
  if (const auto step_s = median_after_first(run.steps.curve("step_s")))
    tiles += tile("step (median)", duration(*step_s));
  tiles += figure_tile("MFU % (median)", median_after_first(run.steps.curve("mfu")));
  if (!run.processes.empty()) {
    if (const auto ranks = run.processes.back().world_size(); !ranks.empty()) tiles += tile("ranks", ranks);
    double seconds = 0;  // without the time between the processes
    for (const ProcessLog& process : run.processes) seconds += process.seconds();
    tiles += tile("time running", duration(seconds));
    tiles += tile("restarts", std::to_string(run.processes.size() - 1));
  }
  return str("<p><span class=\"state ", state.css, "\">", escaped(state.words),
             "</span></p>\n<div class=\"tiles\">\n", tiles, "</div>\n");
}

// The rank that rank 0 last reported as holding the others up; -1: none.
int slowest_now(const PageInput& input) {
  if (input.run.processes.empty()) return -1;
  return static_cast<int>(input.run.processes.back().value("straggler").value_or(-1));
}

std::string straggler_notes(const PageInput& input) {
  std::string notes;
  double before = -1;
  for (const ProcessLog& process : input.run.processes)
    for (const LoggedEvent& event : process.events)
      if (event.name == "straggler" && event.value && std::exchange(before, *event.value) != *event.value)
        notes += *event.value < 0
                     ? str("Step ", event.step, ": no rank holds the others up any longer. ")
                     : str("Step ", event.step, ": rank ", *event.value, " holds the others up. ");
  return notes.empty() ? "" : paragraph(notes);
}

std::string ranks_section(const PageInput& input) {
  if (input.ranks.empty()) return "";
  HtmlTable table{
      .heads = {"rank", "host", "step", "own s/step", "waits s/step", "memory GiB", "memory %", "last event"},
      .numbers = {true, false, true, true, true, true, true}};
  const int slowest = slowest_now(input);
  for (const ProcessLog& rank : input.ranks) {
    table.rows.push_back({std::to_string(rank.rank), rank.host,
                          std::to_string(rank.events.empty() ? 0 : rank.events.back().step),
                          number_or_none("%.4f", rank.value("own_s")),
                          number_or_none("%.4f", rank.value("wait_s")),
                          number_or_none("%.2f", rank.value("memory_gib")),
                          number_or_none("%.1f", rank.value("memory_percent")),
                          rank.events.empty() ? "" : local_time(rank.last_us())});
    table.row_classes.push_back(rank.rank == slowest ? "warn" : "");
  }
  std::string body = to_html(table) + straggler_notes(input);
  if (input.num_ranks > static_cast<int>(input.ranks.size()))
    body += paragraph(str(input.ranks.size(), " of ", input.num_ranks, " ranks are shown."));
  return body;
}

std::string checkpoints_section(const PageInput& input) {
  const auto steps = checkpoint::list_steps(input.run.checkpoint_folder());
  if (steps.empty()) return paragraph("There are none.");
  HtmlTable table{.heads = {"step", "written", "size", "state"}, .numbers = {true, false, true}};
  for (const checkpoint::StepEntry& entry : steps) {
    const StepHealth health = examine_step(entry);
    table.rows.push_back({short_number(static_cast<double>(entry.step)), health.written(),
                          size_text(health.num_bytes), health.state()});
    table.row_classes.push_back(health.problems.empty() ? "" : "bad");
  }
  return to_html(table);
}

std::string restarts_section(const PageInput& input) {
  if (input.run.processes.empty()) return "";
  HtmlTable table{.heads = {"start", "host", "process", "ranks", "steps", "time running", "how it ended"},
                  .numbers = {false, false, true, true}};
  for (size_t i = 0; i < input.run.processes.size(); ++i) {
    const ProcessLog& process = input.run.processes[i];
    const StepRange steps = steps_of(process);
    const ProcessEnd end = end_of(input.run, i, input.now_us);
    table.rows.push_back({local_time(process.first_us()), process.host, std::to_string(process.pid),
                          process.world_size(),
                          steps.last > 0 ? str(steps.first, " to ", steps.last) : "none",
                          duration(process.seconds()), end.words});
    table.row_classes.push_back(end.kind == ProcessEnd::Kind::Failed   ? "bad"
                                : end.kind == ProcessEnd::Kind::Silent ? "warn"
                                                                       : "");
  }
  return to_html(table);
}

std::string configuration_section(const PageInput& input) {
  const auto defaults = config::printed_settings(config::print_toml(train::job_schema(), train::JobConfig{}));
  HtmlTable table{.heads = {"setting", "value"}};
  for (const auto& [key, value] : input.run.settings) {
    const auto usual = defaults.find(key);
    table.rows.push_back({key, value});
    table.row_classes.push_back(usual == defaults.end() || usual->second != value ? "changed" : "");
  }
  return paragraph("Settings that are not the default are marked.") + "<div class=\"wrap\">" +
         to_html(table) + "</div>\n";
}

std::string environment_section(const PageInput& input) {
  if (input.run.processes.empty()) return "";
  HtmlTable table{.heads = {"", ""}};
  for (const auto& [key, value] : input.run.processes.back().environment.items())
    table.rows.push_back({key, value.is_string() ? value.get<std::string>() : value.dump()});
  return "<div class=\"wrap\">" + to_html(table) + "</div>\n";
}

/// A part of the page under a heading with an anchor; without a body there is nothing to show.
struct Section {
  const char* id;
  const char* name;
  std::string body;
};

std::string to_html(const std::vector<Section>& sections) {
  std::string navigation, html;
  for (const auto& [id, name, body] : sections) {
    if (body.empty()) continue;
    navigation += str("<a href=\"#", id, "\">", name, "</a> ");
    html += str("<section id=\"", id, "\">\n<h2>", name, "</h2>\n", body, "</section>\n");
  }
  return str("<nav>", navigation, "</nav>\n", html);
}

constexpr const char* kPageStyle = R"css(
:root { color-scheme: light dark;
  --bg: #f6f7f9; --card: #ffffff; --text: #1c2330; --soft: #5d6778; --line: #e1e5eb; --accent: #1f5fd6;
  --good: #147a4b; --bad: #bb2b2b; --warn: #96600a; --row: #f1f4f8;
  --c0: #1f5fd6; --c1: #d9650b; --c2: #138a5e; --c3: #8a3fd1; --c4: #c2255c; --c5: #0d8ba1; --c6: #8b6b11; --c7: #68717f; }
@media (prefers-color-scheme: dark) { :root {
  --bg: #12151b; --card: #1b2029; --text: #e4e8ef; --soft: #98a3b5; --line: #2d3541; --accent: #7aa7ff;
  --good: #58c999; --bad: #ff8a80; --warn: #e8b45c; --row: #222834;
  --c0: #7aa7ff; --c1: #ff9d57; --c2: #4fcb9a; --c3: #c49bff; --c4: #ff7fa8; --c5: #55c9dd; --c6: #d8b85a; --c7: #a3adbb; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 2px; }
h2 { font-size: 18px; margin: 0 0 12px; }
p { margin: 0 0 10px; color: var(--soft); }
code { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 14px 0 20px; }
nav a { color: var(--accent); text-decoration: none; }
nav a:hover { text-decoration: underline; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; margin: 0 0 18px; }
.state { display: inline-block; padding: 1px 10px; border-radius: 999px; border: 1px solid currentColor; font-size: 13px; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 12px; }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.tile small { display: block; color: var(--soft); font-size: 13px; }
.tile b { font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(480px, 100%), 1fr)); gap: 22px 26px; }
.chart { margin: 0; position: relative; }
figcaption { font-weight: 600; margin-bottom: 4px; }
figcaption small { color: var(--soft); font-weight: 400; font-size: 13px; }
.chart svg { display: block; width: 100%; height: auto; }
.axes text { fill: var(--soft); font-size: 11.5px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.restart { stroke: var(--warn); stroke-dasharray: 3 3; }
.cursor { stroke: var(--soft); stroke-dasharray: 2 3; visibility: hidden; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 5px; vertical-align: -1px; }
.tip { position: absolute; display: none; pointer-events: none; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; padding: 5px 9px; font-size: 13px; box-shadow: 0 2px 10px rgba(0, 0, 0, .18); white-space: nowrap; z-index: 1; }
.tip i { display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 5px; }
.line.s0, .dot.s0 { stroke: var(--c0); } .line.s1, .dot.s1 { stroke: var(--c1); } .line.s2, .dot.s2 { stroke: var(--c2); }
.line.s3, .dot.s3 { stroke: var(--c3); } .line.s4, .dot.s4 { stroke: var(--c4); } .line.s5, .dot.s5 { stroke: var(--c5); }
.line.s6, .dot.s6 { stroke: var(--c6); } .line.s7, .dot.s7 { stroke: var(--c7); }
.dot.s0, .bar.s0 { fill: var(--c0); } .dot.s1, .bar.s1 { fill: var(--c1); } .dot.s2, .bar.s2 { fill: var(--c2); }
.dot.s3, .bar.s3 { fill: var(--c3); } .dot.s4, .bar.s4 { fill: var(--c4); } .dot.s5, .bar.s5 { fill: var(--c5); }
.dot.s6, .bar.s6 { fill: var(--c6); } .dot.s7, .bar.s7 { fill: var(--c7); }
i.s0 { background: var(--c0); } i.s1 { background: var(--c1); } i.s2 { background: var(--c2); } i.s3 { background: var(--c3); }
i.s4 { background: var(--c4); } i.s5 { background: var(--c5); } i.s6 { background: var(--c6); } i.s7 { background: var(--c7); }
.scroll { overflow-x: auto; margin: 6px 0 4px; }
table { border-collapse: collapse; min-width: min(100%, 460px); font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--line); }
th, td { padding: 4px 26px 4px 0; vertical-align: top; white-space: nowrap; }
td { border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
tbody tr:last-child td { border-bottom: 0; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
tr.changed td { background: var(--row); font-weight: 600; }
tr.bad td { color: var(--bad); } tr.warn td { color: var(--warn); }
.wrap td:last-child { white-space: normal; }
footer { color: var(--soft); font-size: 13px; }
@media print { body { background: #fff; } section { break-inside: avoid; } nav { display: none; } }
)css";

constexpr const char* kPageScript = R"js(
// Shows the values at the pointer; the page is complete without it.
for (const chart of document.querySelectorAll("figure.chart")) {
  const svg = chart.querySelector("svg"), cursor = chart.querySelector(".cursor"), tip = chart.querySelector(".tip");
  const series = JSON.parse(chart.querySelector("script").textContent);
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };
  const hide = () => { cursor.style.visibility = "hidden"; tip.style.display = "none"; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const found = series.filter(s => s.x.length).map((s, i) => ({ s, i: series.indexOf(s), at: nearest(s.x, x) }));
    if (!found.length) return hide();
    const best = found.reduce((a, b) => Math.abs(a.s.x[a.at] - x) <= Math.abs(b.s.x[b.at] - x) ? a : b);
    const place = best.s.x[best.at];
    cursor.setAttribute("x1", place); cursor.setAttribute("x2", place); cursor.style.visibility = "visible";
    tip.replaceChildren();
    const line = text => { const row = document.createElement("div"); row.append(text); tip.append(row); return row; };
    line("step " + best.s.step[best.at].toLocaleString("en"));
    for (const { s, i, at } of found) {
      if (Math.abs(s.x[at] - place) > 4) continue;
      const row = line((series.length > 1 ? s.name + ": " : "") + Number(s.y[at].toPrecision(6)).toLocaleString("en", { maximumSignificantDigits: 6 }));
      if (series.length > 1) { const mark = document.createElement("i"); mark.className = "s" + i % 8; row.prepend(mark); }
    }
    tip.style.display = "block";
    const left = place / scale, width = tip.offsetWidth, room = box.width;
    tip.style.left = (left + width + 16 < room ? left + 12 : Math.max(0, left - width - 12)) + "px";
    tip.style.top = svg.offsetTop + 12 + "px";
  });
}
)js";

std::string heading(const RunHistory& run) {
  const std::string description = run.text_setting("job.description");
  const std::string folder = std::filesystem::absolute(run.folder).lexically_normal().string();
  return str("<header>\n<h1>", escaped(description.empty() ? folder : description), "</h1>\n<p>",
             escaped(run.text_setting("model.name")), " ", escaped(run.text_setting("model.flavor")),
             " &middot; <code>", escaped(folder), "</code></p>\n</header>\n");
}

}  // namespace

std::string page(const PageInput& input) {
  const std::string sections = to_html({{"overview", "Overview", overview_section(input)},
                                        {"charts", "Curves", charts_section(input)},
                                        {"time", "Time", time_section(input)},
                                        {"plan", "Plan", plan_section(input)},
                                        {"ranks", "Ranks", ranks_section(input)},
                                        {"validation", "Validation", validation_section(input)},
                                        {"checkpoints", "Checkpoints", checkpoints_section(input)},
                                        {"restarts", "Starts", restarts_section(input)},
                                        {"configuration", "Configuration", configuration_section(input)},
                                        {"environment", "Environment", environment_section(input)}});
  const std::string title = input.run.folder.filename().empty()
                                ? input.run.folder.parent_path().filename().string()
                                : input.run.folder.filename().string();
  return str("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n",
             "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>",
             escaped(title), " - titan report</title>\n<style>", kPageStyle,
             "</style>\n</head>\n<body>\n<main>\n", heading(input.run), sections, "<footer>titan report ",
             kVersion, ", ", local_time(input.now_us), "</footer>\n</main>\n<script>", kPageScript,
             "</script>\n</body>\n</html>\n");
}

}  // namespace titan::cli::report

namespace titan::cli {

namespace {

constexpr const char* kReportNotes =
    R"(RUN is a run's job.dump_folder. Writes one HTML file that needs no network and no other file: loss, gradient
norm, throughput, memory, where the time went, the plan beside what was measured, ranks, validation, checkpoints,
starts, configuration and environment. Works while the run is running; call it again for a new page.
)";

}  // namespace

int report_command(const Arguments& words) {
  std::filesystem::path run, output;
  Parser parser("titan report", "RUN [-o FILE]", kReportNotes);
  parser.path("RUN", run, "a run's folder");
  parser.file("-o,--output", output, "the file to write (default: RUN/report.html)");
  parser.parse(words);
  if (output.empty()) output = run / "report.html";
  report::PageInput input;
  input.run = read_history(run);
  input.ranks = newest_of_ranks(run, report::kMostRanks, {.spans = false});
  input.num_ranks = static_cast<int>(newest_files(run, SIZE_MAX / 2).size());
  report::add_plan(input);
  input.parts = report::measured_parts(run);
  input.lasting = read_memory_file(run);
  input.now_us = now_us();
  write_file_atomic(output, report::page(input));
  return print(output.string() + "\n");
}

}  // namespace titan::cli
