#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <utility>

#include "cli/report/page.h"
#include "cli/text.h"
#include "titan/core/error.h"

namespace titan::cli::report {

namespace {

constexpr size_t kMostMemoryLines = 8;  // the number of colors

// The steps at which the run was resumed.
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

// A series per rank; without structured logs, of rank 0 only.
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
  Chart speed = of_figure(run, "Throughput", "tokens/s per device", "tps");
  speed.from_zero = true;
  Chart memory{.title = "Memory",
               .unit = "GiB, peak of an interval (CPU: peak so far)",
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
      run.processes.size() > 1 ? paragraph("A dashed line marks where the run was resumed.") : "";
  return section("charts", "Curves", note + "<div class=\"charts\">\n" + charts + "</div>\n");
}

namespace {

struct SpanPart {
  const char* span;
  const char* name;
};
constexpr std::array<SpanPart, 7> kSpanParts = {{{"fetching_batch", "data"},
                                                 {"post_dataloading_process", "waiting for others' data"},
                                                 {"fwd_bwd", "forward and backward"},
                                                 {"optim", "optimizer"},
                                                 {"checkpoint_save", "saving"},
                                                 {"eval", "validation"},
                                                 {"collect_dist_metrics", "logging"}}};
constexpr size_t kForward = 2;
constexpr size_t kRest = kSpanParts.size();
constexpr size_t kMostColumns = 60;

/// Seconds by part; the last part is the rest of the step.
using StepTimes = std::array<double, kSpanParts.size() + 1>;

/// Adds up the spans between a step's start and end. Spans of an unfinished step (the process was killed) and
/// of a save after the last step don't count.
class StepAdder {
 public:
  explicit StepAdder(std::map<int64_t, StepTimes>& steps) : steps_(steps) {}

  void take(const LoggedEvent& event) {
    if (event.kind == LoggedEvent::Kind::Start && event.name == "step") times_ = StepTimes{};
    if (event.kind != LoggedEvent::Kind::End || !event.value || !times_) return;
    if (event.name == "step") return close(event);
    const auto part = std::find_if(kSpanParts.begin(), kSpanParts.end(),
                                   [&](const SpanPart& known) { return event.name == known.span; });
    if (part != kSpanParts.end())
      (*times_)[static_cast<size_t>(part - kSpanParts.begin())] += *event.value * 1e-3;
  }

 private:
  // If a step was trained twice, the later time counts. A step without a forward wasn't trained: all ranks
  // agreed to stop.
  void close(const LoggedEvent& end) {
    StepTimes times = *std::exchange(times_, std::nullopt);
    if (times[kForward] == 0) return;
    times[kRest] = *end.value * 1e-3;
    for (size_t i = 0; i < kRest; ++i) times[kRest] -= times[i];
    times[kRest] = std::max(0.0, times[kRest]);
    steps_[end.step] = times;
  }

  std::map<int64_t, StepTimes>& steps_;
  std::optional<StepTimes> times_;
};

std::map<int64_t, StepTimes> times_of_steps(const RunHistory& run) {
  std::map<int64_t, StepTimes> steps;
  for (const ProcessLog& process : run.processes) {
    StepAdder adder(steps);
    for (const LoggedEvent& event : process.events) adder.take(event);
  }
  return steps;
}

StackedChart chart_of(const std::map<int64_t, StepTimes>& steps) {
  StackedChart chart{.title = "Where a step's time goes",
                     .unit = "s, rank 0, means over the steps of a column"};
  for (const SpanPart& part : kSpanParts) chart.parts.push_back(part.name);
  chart.parts.push_back("rest");
  const size_t stride = (steps.size() + kMostColumns - 1) / kMostColumns;
  size_t taken = 0;
  for (const auto& [step, times] : steps) {
    if (taken++ % stride == 0)
      chart.columns.push_back(
          {.first_step = static_cast<double>(step), .values = std::vector<double>(times.size())});
    StackedChart::Column& column = chart.columns.back();
    column.last_step = static_cast<double>(step);
    for (size_t i = 0; i < times.size(); ++i) column.values[i] += times[i];
  }
  for (size_t i = 0; i < chart.columns.size(); ++i) {
    const size_t count = std::min(stride, steps.size() - i * stride);
    for (double& value : chart.columns[i].values) value /= static_cast<double>(count);
  }
  return chart;
}

std::string totals(const RunHistory& run, const std::map<int64_t, StepTimes>& steps) {
  StepTimes sum = {};
  for (const auto& [step, times] : steps)
    for (size_t i = 0; i < times.size(); ++i) sum[i] += times[i];
  double startup = 0, loading = 0, teardown = 0;
  for (const ProcessLog& process : run.processes)
    for (const LoggedEvent& event : process.events) {
      if (event.kind != LoggedEvent::Kind::End || !event.value) continue;
      if (event.name == "startup" || event.name == "model_parallelism_init" || event.name.ends_with(".build"))
        startup += *event.value * 1e-3;
      if (event.name == "checkpoint_load") loading += *event.value * 1e-3;
      if (event.name == "teardown") teardown += *event.value * 1e-3;
    }
  HtmlTable table{.heads = {"part", "time", "share", "a step"}, .numbers = {false, true, true, true}};
  double all = startup + loading + teardown;
  for (double seconds : sum) all += seconds;
  const auto add = [&](const char* name, double seconds, bool per_step) {
    if (seconds < 1e-6 * all) return;
    table.rows.push_back({name, duration(seconds), number("%.1f %%", 100 * seconds / all),
                          per_step ? duration(seconds / static_cast<double>(steps.size())) : ""});
  };
  for (size_t i = 0; i < kSpanParts.size(); ++i) add(kSpanParts[i].name, sum[i], true);
  add("rest of the steps", sum[kRest], true);
  add("start-up", startup, false);
  add("loading a checkpoint", loading, false);
  add("final writes", teardown, false);
  return to_html(table);
}

}  // namespace

std::string time_section(const PageInput& input) {
  const auto steps = times_of_steps(input.run);
  if (steps.empty())
    return section("time", "Time",
                   paragraph("There is no structured log of rank 0 (metrics.structured_logs.enable)."));
  return section("time", "Time",
                 str("<div class=\"charts\">\n", to_html(chart_of(steps)), "<div>", totals(input.run, steps),
                     "</div></div>\n"));
}

}  // namespace titan::cli::report
