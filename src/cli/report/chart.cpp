// The charts of the report's page, as SVG with the data that its script needs.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "cli/report/page.h"
#include "cli/text.h"
#include "core/json.h"
#include "titan/core/error.h"

namespace titan::cli::report {

namespace {

constexpr int kMarks = 5;  // approximately

// 1, 2 or 5 times a power of ten.
double round_distance(double wanted) {
  const double power = std::pow(10, std::floor(std::log10(wanted)));
  for (double factor : {1.0, 2.0, 5.0})
    if (wanted <= factor * power * 1.0000001) return factor * power;
  return 10 * power;
}

}  // namespace

Scale::Scale(double low, double high, bool log, bool widen) : low_(low), high_(high), log_(log && low > 0) {
  // A single value, or values that differ only by rounding, go to the middle.
  if (high_ - low_ <= 1e-12 * std::max(std::abs(low_), std::abs(high_))) {
    const double half = low_ == 0 ? 1 : std::abs(low_) / 2;
    high_ = low_ + half;
    low_ -= log_ ? half / 2 : half;
  }
  log_ ? mark_decades(widen) : mark_linear(widen);
}

void Scale::mark_linear(bool widen) {
  const double distance = round_distance((high_ - low_) / kMarks);
  if (widen) {
    low_ = std::floor(low_ / distance) * distance;
    high_ = std::ceil(high_ / distance) * distance;
  }
  for (double at = std::ceil(low_ / distance - 1e-9); at * distance <= high_ + distance * 1e-9; ++at)
    marks_.push_back(at * distance + 0.0);  // no -0
}

void Scale::mark_decades(bool widen) {
  if (widen) {
    low_ = std::pow(10, std::floor(std::log10(low_) + 1e-9));
    high_ = std::pow(10, std::ceil(std::log10(high_) - 1e-9));
  }
  const double decades = std::log10(high_ / low_);
  const double stride = std::max(1.0, std::ceil(decades / 6));
  for (double power = std::ceil(std::log10(low_) - 1e-9); power <= std::log10(high_) + 1e-9; power += stride)
    marks_.push_back(std::pow(10, power));
}

double Scale::place(double value) const {
  if (!log_) return (value - low_) / (high_ - low_);
  return std::log(value / low_) / std::log(high_ / low_);
}

std::string mark_text(double value, double distance) {
  static constexpr std::array<std::pair<double, const char*>, 4> kUnits = {
      {{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e4, "k"}}};
  double unit = 1;
  const char* letter = "";
  for (const auto& [least, name] : kUnits) {
    if (std::abs(value) < least) continue;
    unit = least == 1e4 ? 1e3 : least;
    letter = name;
    break;
  }
  const double shown = distance / unit;
  const int decimals =
      shown > 0 ? std::clamp(static_cast<int>(std::ceil(-std::log10(shown) - 1e-9)), 0, 9) : 0;
  std::array<char, 48> text{};
  if (value != 0 && std::abs(value) < 1e-4)
    std::snprintf(text.data(), text.size(), "%.0e", value);
  else
    std::snprintf(text.data(), text.size(), "%.*f", decimals, value / unit);
  return str(text.data(), letter);
}

namespace {

double distance_of(const Scale& scale, size_t mark) {
  if (scale.is_log()) return scale.marks()[mark];
  return scale.marks().size() > 1 ? scale.marks()[1] - scale.marks()[0] : 1;
}

constexpr double kFigureWidth = 560, kFigureHeight = 250;
constexpr double kPlotLeft = 58, kPlotRight = 538, kPlotTop = 10, kPlotBottom = 216;

// With one decimal, as SVG takes it.
std::string pixel(double value) { return number("%.1f", value); }

std::string text_at(double x, double y, const char* anchor, const std::string& text) {
  return str("<text x=\"", pixel(x), "\" y=\"", pixel(y), "\" text-anchor=\"", anchor, "\">", escaped(text),
             "</text>\n");
}

std::string legend_html(const std::vector<std::string>& names) {
  if (names.size() < 2) return "";
  std::string html = "<div class=\"legend\">";
  for (size_t i = 0; i < names.size(); ++i)
    html += str("<span><i class=\"s", i % 8, "\"></i>", escaped(names[i]), "</span>");
  return html + "</div>\n";
}

double plot_x(const Scale& scale, double value) {
  return kPlotLeft + scale.place(value) * (kPlotRight - kPlotLeft);
}

double plot_y(const Scale& scale, double value) {
  return kPlotBottom - scale.place(value) * (kPlotBottom - kPlotTop);
}

std::string axes(const Scale& x, const Scale& y) {
  std::string svg = "<g class=\"axes\">\n";
  for (size_t i = 0; i < y.marks().size(); ++i) {
    const double at = plot_y(y, y.marks()[i]);
    svg += str("<line class=\"grid\" x1=\"", pixel(kPlotLeft), "\" x2=\"", pixel(kPlotRight), "\" y1=\"",
               pixel(at), "\" y2=\"", pixel(at), "\"/>\n");
    svg += text_at(kPlotLeft - 6, at + 4, "end", mark_text(y.marks()[i], distance_of(y, i)));
  }
  for (size_t i = 0; i < x.marks().size(); ++i)
    svg += text_at(plot_x(x, x.marks()[i]), kPlotBottom + 17, "middle",
                   mark_text(x.marks()[i], distance_of(x, i)));
  svg += text_at(kPlotRight, kFigureHeight - 2, "end", "step");
  return svg + "</g>\n";
}

// A <figure> with title and legend around a drawing; `data`: JSON for the page's script.
std::string figure(const std::string& title, const std::string& unit, const std::vector<std::string>& legend,
                   const std::string& drawing, const std::string& data) {
  return str("<figure class=\"chart\">\n<figcaption>", escaped(title),
             unit.empty() ? "" : str(" <small>", escaped(unit), "</small>"), "</figcaption>\n",
             legend_html(legend), "<svg viewBox=\"0 0 ", kFigureWidth, " ", kFigureHeight,
             "\" role=\"img\" aria-label=\"", escaped(title), "\">\n", drawing,
             "<line class=\"cursor\" y1=\"", pixel(kPlotTop), "\" y2=\"", pixel(kPlotBottom),
             "\"/>\n</svg>\n<div class=\"tip\"></div>\n<script type=\"application/json\">", data,
             "</script>\n</figure>\n");
}

constexpr size_t kMostPoints = 1000;
constexpr double kLogRatio = 100;

struct Extent {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  void include(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
};

std::string path_of(const Curve& points, const Scale& x, const Scale& y) {
  std::string path;
  for (const auto& [step, value] : points)
    path += str(path.empty() ? "M" : "L", pixel(plot_x(x, step)), " ", pixel(plot_y(y, value)));
  return path;
}

std::string drawn(const ChartSeries& series, size_t number, const Scale& x, const Scale& y) {
  const std::string name = str("s", number % 8);
  const bool alone = series.points.size() == 1;
  std::string svg;
  if (!alone) svg += str("<path class=\"line ", name, "\" d=\"", path_of(series.points, x, y), "\"/>\n");
  if (!series.dots && !alone) return svg;
  for (const auto& [step, value] : series.points)
    svg += str("<circle class=\"dot ", name, "\" cx=\"", pixel(plot_x(x, step)), "\" cy=\"",
               pixel(plot_y(y, value)), "\" r=\"2.5\"/>\n");
  return svg;
}

std::string vertical_marks(const std::vector<double>& steps, const Scale& x) {
  std::string svg;
  for (double step : steps) {
    if (x.place(step) <= 0 || x.place(step) > 1) continue;
    svg += str("<line class=\"restart\" x1=\"", pixel(plot_x(x, step)), "\" x2=\"", pixel(plot_x(x, step)),
               "\" y1=\"", pixel(kPlotTop), "\" y2=\"", pixel(kPlotBottom), "\"/>\n");
  }
  return svg;
}

// A point as the page's script looks it up: its place on the drawing, and its values.
struct ScriptPoint {
  double x;
  double step;
  double value;
};

// JSON that contains no "</script>": names have no '<'.
class ScriptData {
 public:
  void add(const std::string& name, const std::vector<ScriptPoint>& points) {
    nlohmann::ordered_json places = nlohmann::ordered_json::array(), steps = places, values = places;
    for (const ScriptPoint& point : points) {
      places.push_back(std::round(point.x * 10) / 10);
      steps.push_back(static_cast<int64_t>(point.step));
      values.push_back(point.value);
    }
    all_.push_back({{"name", name}, {"x", places}, {"step", steps}, {"y", values}});
  }
  std::string text() const { return json_text(all_); }

 private:
  nlohmann::ordered_json all_ = nlohmann::ordered_json::array();
};

std::string script_data(const Chart& chart, const Scale& x) {
  ScriptData data;
  for (const ChartSeries& series : chart.series) {
    std::vector<ScriptPoint> points;
    for (const auto& [step, value] : series.points) points.push_back({plot_x(x, step), step, value});
    data.add(series.name, points);
  }
  return data.text();
}

}  // namespace

Curve thinned(const Curve& curve, size_t most) {
  if (curve.size() <= most) return curve;
  const size_t stretches = most / 2;
  Curve kept;
  for (size_t i = 0; i < stretches; ++i) {
    const auto begin = curve.begin() + static_cast<std::ptrdiff_t>(i * curve.size() / stretches);
    const auto end = curve.begin() + static_cast<std::ptrdiff_t>((i + 1) * curve.size() / stretches);
    const auto by_value = [](const auto& a, const auto& b) { return a.second < b.second; };
    auto [low, high] = std::minmax_element(begin, end, by_value);
    if (low > high) std::swap(low, high);
    kept.push_back(*low);
    if (high != low) kept.push_back(*high);
  }
  return kept;
}

std::string to_html(const Chart& given) {
  Chart chart = given;
  Extent steps, values;
  for (ChartSeries& series : chart.series) {
    series.points = thinned(series.points, kMostPoints);
    for (const auto& [step, value] : series.points) {
      steps.include(step);
      values.include(value);
    }
  }
  if (steps.high < steps.low) return "";
  const bool log = chart.may_be_log && values.low > 0 && values.high > kLogRatio * values.low;
  if (chart.from_zero) values.include(0);
  const Scale x(steps.low, steps.high, false, false), y(values.low, values.high, log, true);
  std::string drawing = axes(x, y) + vertical_marks(chart.marks, x);
  std::vector<std::string> names;
  for (size_t i = 0; i < chart.series.size(); ++i) {
    drawing += drawn(chart.series[i], i, x, y);
    names.push_back(chart.series[i].name);
  }
  return figure(chart.title, log ? chart.unit + (chart.unit.empty() ? "" : ", ") + "logarithmic" : chart.unit,
                names, drawing, script_data(chart, x));
}

namespace {

std::string bars(const StackedChart::Column& column, const Scale& x, const Scale& y) {
  // Half a step to each side, so that neighbors touch.
  const double left = plot_x(x, column.first_step - 0.5), right = plot_x(x, column.last_step + 0.5);
  std::string svg;
  double below = 0;
  for (size_t part = 0; part < column.values.size(); ++part) {
    const double bottom = plot_y(y, below), top = plot_y(y, below += column.values[part]);
    if (bottom - top < 0.05) continue;
    svg += str("<rect class=\"bar s", part % 8, "\" x=\"", pixel(left), "\" width=\"",
               pixel(std::max(0.6, right - left - 0.6)), "\" y=\"", pixel(top), "\" height=\"",
               pixel(bottom - top), "\"/>\n");
  }
  return svg;
}

std::string script_data(const StackedChart& chart, const Scale& x) {
  ScriptData data;
  for (size_t part = 0; part < chart.parts.size(); ++part) {
    std::vector<ScriptPoint> points;
    for (const StackedChart::Column& column : chart.columns)
      points.push_back(
          {plot_x(x, (column.first_step + column.last_step) / 2), column.last_step, column.values[part]});
    data.add(chart.parts[part], points);
  }
  return data.text();
}

}  // namespace

std::string to_html(const StackedChart& chart) {
  if (chart.columns.empty()) return "";
  double highest = 0;
  for (const StackedChart::Column& column : chart.columns)
    highest = std::max(highest, std::accumulate(column.values.begin(), column.values.end(), 0.0));
  const Scale x(chart.columns.front().first_step - 0.5, chart.columns.back().last_step + 0.5, false, false);
  const Scale y(0, highest, false, true);
  std::string drawing = axes(x, y);
  for (const StackedChart::Column& column : chart.columns) drawing += bars(column, x, y);
  return figure(chart.title, chart.unit, chart.parts, drawing, script_data(chart, x));
}

// ---- sections of the page that are made of charts

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

double sum_of(const StepTimes& times) { return std::accumulate(times.begin(), times.end(), 0.0); }

void add_span(const LoggedEvent& end, StepTimes& times) {
  const auto part = std::ranges::find(kSpanParts, end.name, &SpanPart::span);
  if (part != kSpanParts.end()) times[static_cast<size_t>(part - kSpanParts.begin())] += *end.value * 1e-3;
}

// Spans of an unfinished step (the process was killed) and of a save after the last step don't count. If a
// step was trained twice, the later time counts. A step without a forward wasn't trained: all ranks agreed to
// stop.
std::map<int64_t, StepTimes> times_of_steps(const RunHistory& run) {
  std::map<int64_t, StepTimes> steps;
  for (const ProcessLog& process : run.processes) {
    std::optional<StepTimes> times;  // for the step that has begun
    for (const LoggedEvent& event : process.events) {
      const bool is_step = event.name == "step";
      if (event.kind == LoggedEvent::Kind::Start && is_step) times = StepTimes{};
      if (event.kind != LoggedEvent::Kind::End || !event.value || !times) continue;
      add_span(event, *times);
      if (!is_step) continue;
      times->at(kRest) = std::max(0.0, *event.value * 1e-3 - sum_of(*times));
      if (times->at(kForward) > 0) steps[event.step] = *times;
      times.reset();
    }
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
  const double all = startup + loading + teardown + sum_of(sum);
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
  if (charts.empty()) return paragraph("No step has been logged yet.");
  const std::string note =
      run.processes.size() > 1 ? paragraph("A dashed line marks where the run was resumed.") : "";
  return note + "<div class=\"charts\">\n" + charts + "</div>\n";
}

std::string time_section(const PageInput& input) {
  const auto steps = times_of_steps(input.run);
  if (steps.empty())
    return paragraph("There is no structured log of rank 0 (metrics.structured_logs.enable).");
  return str("<div class=\"charts\">\n", to_html(chart_of(steps)), "<div>", totals(input.run, steps),
             "</div></div>\n");
}

}  // namespace titan::cli::report
