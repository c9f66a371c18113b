#pragma once

// The page of `titan report`: one HTML document that needs no other file. Charts are SVG. Colors are classes
// (s0, s1, ...) of the page's style sheet, light and dark. The page includes the data for its script, which
// shows the values under the pointer.

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/run_folder.h"

namespace titan::cli::report {

/// Escapes HTML, for text and attributes.
std::string escaped(std::string_view text);

struct HtmlTable {
  std::vector<std::string> heads;
  std::vector<std::vector<std::string>> rows = {};  ///< plain text
  std::vector<bool> numbers = {};                   ///< by column: right-aligned; missing: text
  std::vector<std::string> row_classes = {};        ///< by row; missing: none
};
std::string to_html(const HtmlTable& table);

std::string paragraph(std::string_view text);

/// Where the time of one step went on rank 0, by its roofline report.
struct StepParts {
  int64_t step = 0;
  double compute_s = 0, optimizer_s = 0;
  double waits_s = 0;  ///< for other ranks
  double host_s = 0;   ///< in no operation
};

struct PageInput {
  RunHistory run;
  /// The instants and errors that each rank's newest process logged, for at most kMostRanks ranks.
  std::vector<ProcessLog> ranks;
  int num_ranks = 0;  ///< ranks that have a log
  std::optional<RunPlan> plan = {};
  std::string no_plan = {};             ///< why there is none although there is a file; "": there is no file
  std::optional<StepParts> parts = {};  ///< unset: the run has no roofline report
  std::optional<LastingMemory> lasting = {};
  int64_t now_us = 0;  ///< when the page is made
};
inline constexpr size_t kMostRanks = 64;

std::string page(const PageInput& input);

// Sections of the page, without their headings; "" when there is nothing to show.
std::string charts_section(const PageInput& input);
std::string time_section(const PageInput& input);
std::string plan_section(const PageInput& input);
std::string validation_section(const PageInput& input);

/// From the run's plan.json.
void add_plan(PageInput& input);
/// From a run's roofline.json; nullopt if the file is missing or something else.
std::optional<StepParts> measured_parts(const std::filesystem::path& run);

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
