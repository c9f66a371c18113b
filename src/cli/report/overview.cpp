#include <algorithm>

#include "cli/report/html.h"
#include "cli/report/page.h"
#include "cli/text.h"
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

// Behind the first logged step, which pays for set-up.
std::optional<double> median_of_curve(Curve curve) {
  if (curve.empty()) return std::nullopt;
  if (curve.size() > 1) curve.erase(curve.begin());
  const auto middle = curve.begin() + static_cast<std::ptrdiff_t>(curve.size() / 2);
  std::nth_element(curve.begin(), middle, curve.end(),
                   [](const auto& a, const auto& b) { return a.second < b.second; });
  return middle->second;
}

// Of all processes, without the time in between.
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
  tiles += figure_tile("tokens/s and device (median)", median_of_curve(run.steps.curve("tps")));
  if (const auto step_s = median_of_curve(run.steps.curve("step_s")))
    tiles += tile("step (median)", duration(*step_s));
  tiles += figure_tile("MFU % (median)", median_of_curve(run.steps.curve("mfu")));
  if (const std::string ranks = world_text(run); !ranks.empty()) tiles += tile("ranks", ranks);
  if (!run.processes.empty()) {
    tiles += tile("time at work", duration(seconds_at_work(run)));
    tiles += tile("restarts", std::to_string(run.processes.size() - 1));
  }
  return section("overview", "Overview",
                 str("<p><span class=\"state ", state.css, "\">", escaped(state.words),
                     "</span></p>\n<div class=\"tiles\">\n", tiles, "</div>\n"));
}

}  // namespace titan::cli::report
