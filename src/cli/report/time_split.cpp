#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <utility>

#include "cli/report/chart.h"
#include "cli/report/html.h"
#include "cli/report/page.h"
#include "cli/text.h"
#include "titan/core/error.h"

namespace titan::cli::report {

namespace {

struct SpanPart {
  const char* span;
  const char* name;
};
constexpr std::array<SpanPart, 7> kSpanParts = {{{"fetching_batch", "data"},
                                                 {"post_dataloading_process", "waits for others' data"},
                                                 {"fwd_bwd", "forward and backward"},
                                                 {"optim", "optimizer"},
                                                 {"checkpoint_save", "saving"},
                                                 {"eval", "validation"},
                                                 {"collect_dist_metrics", "logging"}}};
constexpr size_t kForward = 2;
constexpr size_t kRest = kSpanParts.size();
constexpr size_t kMostColumns = 60;

/// Seconds by part, the last one what the step spent elsewhere.
using StepTimes = std::array<double, kSpanParts.size() + 1>;

/// Adds the spans of one step up: those between its start and its end. What a killed process left of one, and
/// a save behind the last one, are no part of a step.
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
  // Of a step that was taken twice, the later time counts. Without a forward none was taken: all ranks agreed
  // to stop.
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
  add("the end: last writes", teardown, false);
  return to_html(table);
}

}  // namespace

std::string time_section(const PageInput& input) {
  const auto steps = times_of_steps(input.run);
  if (steps.empty())
    return section("time", "Time",
                   paragraph("The run left no structured log of rank 0 (metrics.structured_logs.enable)."));
  return section("time", "Time",
                 str("<div class=\"charts\">\n", to_html(chart_of(steps)), "<div>", totals(input.run, steps),
                     "</div></div>\n"));
}

}  // namespace titan::cli::report
