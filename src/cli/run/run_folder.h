#pragma once

// A run's folder as its files stand now: config.toml, metrics.jsonl, validation.jsonl and the checkpoints.
// `titan compare`, `report`, `sweep` and `top` read runs through this header; run_history.h adds the structured
// logs.

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace titan::cli {

/// Values of a metric by step: (step, value). Rows without a number (an infinite loss is null) are left out.
using Curve = std::vector<std::pair<double, double>>;

/// How lines that aren't rows are handled. A full disk or a power failure leaves such lines.
enum class BadLines { Skip, Refuse };

/// Rows of metrics.jsonl or validation.jsonl.
class MetricRows {
 public:
  struct Options {
    int64_t tail_bytes = -1;  ///< only rows that begin in the last so many bytes; -1: all
    BadLines bad_lines = BadLines::Skip;
  };

  MetricRows() = default;
  /// A missing file has no rows. A last line without its newline is ignored: the run was killed while it wrote
  /// it. With BadLines::Refuse, throws Error that names the line.
  MetricRows(const std::filesystem::path& path, const Options& options);
  explicit MetricRows(const std::filesystem::path& path) : MetricRows(path, Options{}) {}

  bool empty() const { return steps_.empty(); }
  size_t size() const { return steps_.size(); }
  int64_t step(size_t row) const { return steps_[row]; }
  int64_t first_step() const { return empty() ? 0 : steps_.front(); }
  int64_t last_step() const { return empty() ? 0 : steps_.back(); }
  std::optional<double> value(size_t row, const char* key) const;
  std::optional<double> last(const char* key) const;
  Curve curve(const char* key) const;
  /// The last row of a step.
  std::optional<size_t> row_of(int64_t step) const;

 private:
  void add(const nlohmann::json& row);

  std::vector<int64_t> steps_;
  std::unordered_map<int64_t, size_t> rows_;            // the last row of each step
  std::map<std::string, std::vector<double>> columns_;  // NaN: the row has no such number
};

/// The median over the steps after the first, which pays for set-up; none without values.
std::optional<double> median_after_first(Curve curve);

struct RunFolder {
  std::filesystem::path folder;
  std::map<std::string, std::string> settings;  ///< full name -> value as TOML
  MetricRows steps;
  MetricRows validations;  ///< by the training step that they followed

  /// The value as TOML; "" if the run has no such setting.
  std::string setting(const std::string& key) const;
  /// A string's value, without quotes and escapes.
  std::string text_setting(const std::string& key) const;
  int64_t total_steps() const;
  std::filesystem::path checkpoint_folder() const;
};

/// Throws ConfigError when the folder has no config.toml.
RunFolder read_run_folder(const std::filesystem::path& folder, const MetricRows::Options& options = {});

/// The folder within a run's folder that the setting `key` names; `usual`: its default.
std::filesystem::path folder_of_setting(const std::filesystem::path& run, const std::string& key,
                                        const std::string& usual);

}  // namespace titan::cli
