#include "cli/run/run_folder.h"

#include <algorithm>
#include <cmath>
#include <fstream>

#include "config/document.h"
#include "core/json.h"
#include "titan/config/load.h"
#include "core/file.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

namespace fs = std::filesystem;

// A TOML string without quotes and escapes; other values as they are.
std::string text_of_toml(const std::string& value) {
  const config::Document document = config::read_toml("value = " + value, "");
  if (!document.problems.empty() || document.leaves.size() != 1) return value;
  const auto* text = std::get_if<std::string>(&document.leaves.front().value.value);
  return text ? *text : value;
}

}  // namespace

MetricRows::MetricRows(const fs::path& path, const Options& options) {
  if (!fs::exists(path)) return;
  std::ifstream lines(path);
  std::string line;
  const auto size = static_cast<int64_t>(fs::file_size(path));
  if (options.tail_bytes >= 0 && size > options.tail_bytes) {
    lines.seekg(size - options.tail_bytes - 1);  // a row that begins there is whole
    std::getline(lines, line);
  }
  for (int64_t number = 1; std::getline(lines, line) && !lines.eof(); ++number) {
    const auto row = parse_json(line);
    if (row.is_object() && row.contains("step") && row["step"].is_number_integer())
      add(row);
    else
      TITAN_CHECK(options.bad_lines == BadLines::Skip, path.string(), ":", number, ": not a logged step");
  }
  for (auto& [key, values] : columns_) values.resize(steps_.size(), std::nan(""));
}

void MetricRows::add(const nlohmann::json& row) {
  for (const auto& [key, value] : row.items()) {
    if (!value.is_number()) continue;
    auto& column = columns_[key];
    column.resize(steps_.size(), std::nan(""));
    column.push_back(value.get<double>());
  }
  const auto step = row["step"].get<int64_t>();
  rows_[step] = steps_.size();
  steps_.push_back(step);
}

std::optional<double> MetricRows::value(size_t row, const char* key) const {
  const auto found = columns_.find(key);
  if (found == columns_.end() || std::isnan(found->second[row])) return std::nullopt;
  return found->second[row];
}

std::optional<double> MetricRows::last(const char* key) const {
  return empty() ? std::nullopt : value(size() - 1, key);
}

Curve MetricRows::curve(const char* key) const {
  Curve curve;
  for (size_t row = 0; row < size(); ++row)
    if (const auto y = value(row, key)) curve.emplace_back(static_cast<double>(steps_[row]), *y);
  return curve;
}

std::optional<size_t> MetricRows::row_of(int64_t step) const {
  const auto found = rows_.find(step);
  return found == rows_.end() ? std::nullopt : std::optional(found->second);
}

std::optional<double> median_after_first(Curve curve) {
  if (curve.empty()) return std::nullopt;
  if (curve.size() > 1) curve.erase(curve.begin());
  const auto middle = curve.begin() + static_cast<std::ptrdiff_t>(curve.size() / 2);
  std::nth_element(curve.begin(), middle, curve.end(),
                   [](const auto& a, const auto& b) { return a.second < b.second; });
  return middle->second;
}

std::string RunFolder::setting(const std::string& key) const {
  const auto found = settings.find(key);
  return found == settings.end() ? "" : found->second;
}

std::string RunFolder::text_setting(const std::string& key) const { return text_of_toml(setting(key)); }

int64_t RunFolder::total_steps() const {
  const std::string steps = setting("training.steps");
  return steps.empty() ? 0 : std::stoll(steps);
}

fs::path RunFolder::checkpoint_folder() const {
  const std::string name = text_setting("checkpoint.folder");
  return folder / (name.empty() ? "checkpoint" : name);
}

RunFolder read_run_folder(const fs::path& folder, const MetricRows::Options& options) {
  if (!fs::exists(folder / "config.toml"))
    throw ConfigError(str(folder.string(), " holds no run: it has no config.toml"));
  return {folder, config::printed_settings(read_file(folder / "config.toml")),
          MetricRows(folder / "metrics.jsonl", options), MetricRows(folder / "validation.jsonl", options)};
}

fs::path folder_of_setting(const fs::path& run, const std::string& key, const std::string& usual) {
  if (!fs::exists(run / "config.toml")) return run / usual;
  const auto settings = config::printed_settings(read_file(run / "config.toml"));
  const auto given = settings.find(key);
  return run / (given == settings.end() ? usual : text_of_toml(given->second));
}

}  // namespace titan::cli
