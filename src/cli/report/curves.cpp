#include "cli/report/chart.h"
#include "cli/report/html.h"
#include "cli/report/page.h"
#include "titan/core/error.h"

namespace titan::cli::report {

namespace {

constexpr size_t kMostMemoryLines = 8;  // there are so many colours

// Where the run was taken up again.
std::vector<double> restart_steps(const RunHistory& run) {
  std::vector<double> steps;
  for (size_t i = 1; i < run.processes.size(); ++i)
    if (const int64_t first = steps_of(run.processes[i]).first; first > 0)
      steps.push_back(static_cast<double>(first));
  return steps;
}

Curve instants_of(const ProcessLog& log, const char* name) {
  Curve curve;
  for (const LoggedEvent& event : log.events)
    if (event.name == name && event.value) curve.emplace_back(static_cast<double>(event.step), *event.value);
  return curve;
}

// Of each rank; of rank 0 alone where nothing else was logged.
std::vector<ChartSeries> memory_series(const PageInput& input) {
  std::vector<ChartSeries> series;
  for (const ProcessLog& rank : input.ranks)
    if (Curve curve = instants_of(rank, "memory_gib"); !curve.empty() && series.size() < kMostMemoryLines)
      series.push_back({str("rank ", rank.rank), std::move(curve)});
  if (series.empty()) series.push_back({"rank 0", input.run.steps.curve("memory_gib")});
  return series;
}

Chart of_figure(const RunHistory& run, const char* title, const char* unit, const char* key) {
  return {
      .title = title, .unit = unit, .series = {{title, run.steps.curve(key)}}, .marks = restart_steps(run)};
}

}  // namespace

std::string charts_section(const PageInput& input) {
  const RunHistory& run = input.run;
  Chart loss = of_figure(run, "Loss", "", "loss");
  loss.series[0].name = "training";
  if (!run.validations.empty())
    loss.series.push_back({.name = "validation", .points = run.validations.curve("loss"), .dots = true});
  Chart norm = of_figure(run, "Gradient norm", "before clipping", "grad_norm");
  norm.may_be_log = true;
  Chart speed = of_figure(run, "Throughput", "tokens/s and device", "tps");
  speed.from_zero = true;
  Chart memory{.title = "Memory",
               .unit = "GiB, highest of an interval (CPU: so far)",
               .series = memory_series(input),
               .marks = restart_steps(run),
               .from_zero = true};
  std::string charts = to_html(loss) + to_html(norm) + to_html(speed) + to_html(memory) +
                       to_html(of_figure(run, "Learning rate", "", "lr"));
  Chart mfu = of_figure(run, "MFU", "%", "mfu");
  mfu.from_zero = true;
  charts += to_html(mfu);
  if (charts.empty()) return section("charts", "Curves", paragraph("No step has been logged yet."));
  const std::string note =
      run.processes.size() > 1 ? paragraph("A dashed line is where the run was taken up again.") : "";
  return section("charts", "Curves", note + "<div class=\"charts\">\n" + charts + "</div>\n");
}

}  // namespace titan::cli::report
