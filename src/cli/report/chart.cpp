#include "cli/report/chart.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include "cli/report/figure.h"
#include "titan/core/error.h"

namespace titan::cli::report {

namespace {

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

// What the script looks up: places on the drawing and the values as they are.
std::string script_data(const Chart& chart, const Scale& x) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const ChartSeries& series : chart.series) {
    nlohmann::ordered_json places = nlohmann::ordered_json::array(), steps = places, values = places;
    for (const auto& [step, value] : series.points) {
      places.push_back(std::round(plot_x(x, step) * 10) / 10);
      steps.push_back(static_cast<int64_t>(step));
      values.push_back(value);
    }
    all.push_back({{"name", series.name}, {"x", places}, {"step", steps}, {"y", values}});
  }
  // No "</script>" can be in it: names hold no '<'.
  return all.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
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
    for (const auto& [step, value] : series.points) steps.include(step), values.include(value);
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

}  // namespace titan::cli::report
