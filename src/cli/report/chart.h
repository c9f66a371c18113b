#pragma once

// Charts as SVG within a page. Colors are classes (s0, s1, ...) of the page's style sheet, light and dark. The
// data is included for the page's script, which shows values under the pointer.

#include <string>
#include <utility>
#include <vector>

#include "cli/run/run_history.h"

namespace titan::cli::report {

/// Maps values to places on an axis, and chooses the marked values.
class Scale {
 public:
  /// Over [low, high]; `widen` extends it to the next marks. `log`: by powers of ten, for values above 0.
  Scale(double low, double high, bool log, bool widen);

  /// 0 at the low end, 1 at the high one.
  double place(double value) const;
  const std::vector<double>& marks() const { return marks_; }
  bool is_log() const { return log_; }

 private:
  void mark_linear(bool widen);
  void mark_decades(bool widen);

  double low_, high_;
  bool log_;
  std::vector<double> marks_;
};

/// "0.25", "1000", "2.5M", with the digits that marks `distance` apart need.
std::string mark_text(double value, double distance);

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
  bool may_be_log = false;  ///< logarithmic if values span more than two powers of ten
};
/// A figure with title, legend (for two series or more) and drawing; "" without points.
std::string to_html(const Chart& chart);

/// Stacked bars over the steps: the parts of a whole.
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

/// Keeps at most `most` points: the lowest and the highest of each stretch, so that peaks remain.
Curve thinned(const Curve& curve, size_t most);

}  // namespace titan::cli::report
