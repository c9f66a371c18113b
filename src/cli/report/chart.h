#pragma once

// From values to a place on an axis, and the values that are marked on it.

#include <string>
#include <utility>
#include <vector>

#include "cli/run/run_history.h"

namespace titan::cli::report {

class Scale {
 public:
  /// Over [low, high], widened to marks where `widen`; `log`: by powers of ten, for values above 0.
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

/// "0.25", "1000", "2.5M"; as many digits as marks `distance` apart need.
std::string mark_text(double value, double distance);

// What drawings share: the frame with its axes.

inline constexpr double kFigureWidth = 560, kFigureHeight = 250;
inline constexpr double kPlotLeft = 58, kPlotRight = 538, kPlotTop = 10, kPlotBottom = 216;

double plot_x(const Scale& scale, double value);
double plot_y(const Scale& scale, double value);
/// With one decimal, as SVG takes it.
std::string pixel(double value);

std::string axes(const Scale& x, const Scale& y);
/// `<figure>` with title and legend around a drawing; `data`: JSON for the page's script.
std::string figure(const std::string& title, const std::string& unit, const std::vector<std::string>& legend,
                   const std::string& drawing, const std::string& data);

// Charts as SVG within a page. Colours are classes (s0, s1, ...) of the page's style, light and dark; the
// data goes along for the page's script, which shows values under the pointer.

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
