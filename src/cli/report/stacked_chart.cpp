#include <algorithm>
#include <cmath>
#include <numeric>

#include <nlohmann/json.hpp>

#include "cli/report/chart.h"
#include "cli/report/figure.h"
#include "titan/core/error.h"

namespace titan::cli::report {

namespace {

double height_of(const StackedChart::Column& column) {
  return std::accumulate(column.values.begin(), column.values.end(), 0.0);
}

std::string bars(const StackedChart::Column& column, const Scale& x, const Scale& y) {
  // Half a step to either side, so that neighbours touch.
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

std::string columns_data(const StackedChart& chart, const Scale& x) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (size_t part = 0; part < chart.parts.size(); ++part) {
    nlohmann::ordered_json places = nlohmann::ordered_json::array(), steps = places, values = places;
    for (const StackedChart::Column& column : chart.columns) {
      places.push_back(std::round(plot_x(x, (column.first_step + column.last_step) / 2) * 10) / 10);
      steps.push_back(static_cast<int64_t>(column.last_step));
      values.push_back(column.values[part]);
    }
    all.push_back({{"name", chart.parts[part]}, {"x", places}, {"step", steps}, {"y", values}});
  }
  return all.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace

std::string to_html(const StackedChart& chart) {
  if (chart.columns.empty()) return "";
  double highest = 0;
  for (const StackedChart::Column& column : chart.columns) highest = std::max(highest, height_of(column));
  const Scale x(chart.columns.front().first_step - 0.5, chart.columns.back().last_step + 0.5, false, false);
  const Scale y(0, highest, false, true);
  std::string drawing = axes(x, y);
  for (const StackedChart::Column& column : chart.columns) drawing += bars(column, x, y);
  return figure(chart.title, chart.unit, chart.parts, drawing, columns_data(chart, x));
}

}  // namespace titan::cli::report
