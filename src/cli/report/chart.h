#pragma once

// Charts as SVG within a page. Colours are classes (s0, s1, ...) of the page's style, light and dark; the
// data goes along for the page's script, which shows values under the pointer.

#include <string>
#include <utility>
#include <vector>

#include "cli/run/run_history.h"

namespace titan::cli::report {

struct ChartSeries {
  std::string name;
  Curve points;
  bool dots = false;  ///< else a line
};

struct Chart {
  std::string title;
  std::string unit;  ///< "" for none
  std::vector<ChartSeries> series;
  std::vector<double> marks = {};  ///< steps that get a vertical line: restarts
  bool from_zero = false;
  bool may_be_log = false;  ///< where values spread over more than two powers of ten
};
/// A figure with title, legend (of two series or more) and drawing; "" without points.
std::string to_html(const Chart& chart);

/// Parts of a whole over the steps, on top of each other.
struct StackedChart {
  std::string title;
  std::string unit;
  std::vector<std::string> parts = {};
  struct Column {
    double first_step = 0, last_step = 0;
    std::vector<double> values = {};  ///< by part
  };
  std::vector<Column> columns = {};
};
std::string to_html(const StackedChart& chart);

/// At most so many points: of each stretch the lowest and the highest one, so that peaks stay.
Curve thinned(const Curve& curve, size_t most);

}  // namespace titan::cli::report
