#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "cli/checkpoint/commands.h"
#include "cli/report/page.h"
#include "cli/run/run_folder.h"
#include "cli/text.h"
#include "job/job_config.h"
#include "titan/config/load.h"
#include "titan/core/error.h"

namespace titan::cli::report {

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
  return std::min_element(curve.begin(), curve.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; })
      ->second;
}

// The running time of all processes, without the time between them.
double seconds_at_work(const RunHistory& run) {
  double seconds = 0;
  for (const ProcessLog& process : run.processes)
    seconds += static_cast<double>(process.last_us() - process.first_us()) * 1e-6;
  return seconds;
}

std::string world_text(const RunHistory& run) {
  if (run.processes.empty()) return "";
  const auto& environment = run.processes.back().environment;
  const auto size = environment.find("world_size");
  return size != environment.end() ? size->dump() : "";
}

}  // namespace

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
  if (const std::string ranks = world_text(run); !ranks.empty()) tiles += tile("ranks", ranks);
  if (!run.processes.empty()) {
    tiles += tile("time running", duration(seconds_at_work(run)));
    tiles += tile("restarts", std::to_string(run.processes.size() - 1));
  }
  return section("overview", "Overview",
                 str("<p><span class=\"state ", state.css, "\">", escaped(state.words),
                     "</span></p>\n<div class=\"tiles\">\n", tiles, "</div>\n"));
}

namespace {

std::string value_text(const LoggedEvent* event, const char* format) {
  return event && event->value ? number(format, *event->value) : "";
}

// The rank that rank 0 last reported as holding the others up; -1: none.
int slowest_now(const PageInput& input) {
  if (input.run.processes.empty()) return -1;
  const LoggedEvent* named = input.run.processes.back().last("straggler");
  return named && named->value ? static_cast<int>(*named->value) : -1;
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

// For marking the settings that aren't defaults.
std::map<std::string, std::string> default_settings() {
  return config::printed_settings(config::print_toml(train::job_schema(), train::JobConfig{}));
}

}  // namespace

std::string ranks_section(const PageInput& input) {
  if (input.ranks.empty()) return "";
  HtmlTable table{
      .heads = {"rank", "host", "step", "own s/step", "waits s/step", "memory GiB", "memory %", "last event"},
      .numbers = {true, false, true, true, true, true, true}};
  const int slowest = slowest_now(input);
  for (const ProcessLog& rank : input.ranks) {
    table.rows.push_back({std::to_string(rank.rank), rank.host,
                          std::to_string(rank.events.empty() ? 0 : rank.events.back().step),
                          value_text(rank.last("own_s"), "%.4f"), value_text(rank.last("wait_s"), "%.4f"),
                          value_text(rank.last("memory_gib"), "%.2f"),
                          value_text(rank.last("memory_percent"), "%.1f"),
                          rank.events.empty() ? "" : local_time(rank.last_us())});
    table.row_classes.push_back(rank.rank == slowest ? "warn" : "");
  }
  std::string body = to_html(table) + straggler_notes(input);
  if (input.num_ranks > static_cast<int>(input.ranks.size()))
    body += paragraph(str(input.ranks.size(), " of ", input.num_ranks, " ranks are shown."));
  return section("ranks", "Ranks", body);
}

std::string validation_section(const PageInput& input) {
  const MetricRows& rows = input.run.validations;
  if (rows.empty()) return section("validation", "Validation", paragraph("The run has no validations."));
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
  return section("validation", "Validation", paragraph("The best validation is marked.") + to_html(table));
}

std::string checkpoints_section(const PageInput& input) {
  const auto steps = checkpoint::list_steps(input.run.checkpoint_folder());
  if (steps.empty()) return section("checkpoints", "Checkpoints", paragraph("There are none."));
  HtmlTable table{.heads = {"step", "written", "size", "state"}, .numbers = {true, false, true}};
  for (const checkpoint::StepEntry& entry : steps) {
    const StepHealth health = examine_step(entry);
    table.rows.push_back({short_number(static_cast<double>(entry.step)), health.written(),
                          size_text(health.num_bytes), health.state()});
    table.row_classes.push_back(health.problems.empty() ? "" : "bad");
  }
  return section("checkpoints", "Checkpoints", to_html(table));
}

std::string restarts_section(const PageInput& input) {
  if (input.run.processes.empty()) return "";
  HtmlTable table{.heads = {"start", "host", "process", "ranks", "steps", "time running", "how it ended"},
                  .numbers = {false, false, true, true}};
  for (size_t i = 0; i < input.run.processes.size(); ++i) {
    const ProcessLog& process = input.run.processes[i];
    const StepRange steps = steps_of(process);
    const ProcessEnd end = end_of(input.run, i, input.now_us);
    const auto size = process.environment.find("world_size");
    table.rows.push_back({local_time(process.first_us()), process.host, std::to_string(process.pid),
                          size != process.environment.end() ? size->dump() : "",
                          steps.last > 0 ? str(steps.first, " to ", steps.last) : "none",
                          duration(static_cast<double>(process.last_us() - process.first_us()) * 1e-6),
                          end.words});
    table.row_classes.push_back(end.kind == ProcessEnd::Kind::Failed   ? "bad"
                                : end.kind == ProcessEnd::Kind::Silent ? "warn"
                                                                       : "");
  }
  return section("restarts", "Starts", to_html(table));
}

std::string configuration_section(const PageInput& input) {
  const auto defaults = default_settings();
  HtmlTable table{.heads = {"setting", "value"}};
  for (const auto& [key, value] : input.run.settings) {
    const auto usual = defaults.find(key);
    table.rows.push_back({key, value});
    table.row_classes.push_back(usual == defaults.end() || usual->second != value ? "changed" : "");
  }
  return section("configuration", "Configuration",
                 paragraph("Settings that are not the default are marked.") + "<div class=\"wrap\">" +
                     to_html(table) + "</div>\n");
}

std::string environment_section(const PageInput& input) {
  if (input.run.processes.empty()) return "";
  HtmlTable table{.heads = {"", ""}};
  for (const auto& [key, value] : input.run.processes.back().environment.items())
    table.rows.push_back({key, value.is_string() ? value.get<std::string>() : value.dump()});
  return section("environment", "Environment", "<div class=\"wrap\">" + to_html(table) + "</div>\n");
}

}  // namespace titan::cli::report
