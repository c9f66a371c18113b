#include "cli/run/run_folder.h"

#include <algorithm>
#include <cmath>
#include <sstream>


#include "cli/checkpoint/commands.h"
#include "cli/text.h"
#include "config/differences.h"
#include "config/document.h"
#include "core/json_tree.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/config/table.h"
#include "titan/core/error.h"
#include "titan/core/file.h"

namespace titan::cli {

namespace {

// A run that was killed may leave its last line unfinished.
LoggedSteps read_steps(const std::filesystem::path& path) {
  LoggedSteps steps;
  std::istringstream lines(read_file(path));
  std::string line;
  for (int64_t number = 1; std::getline(lines, line); ++number) {
    if (lines.eof()) break;  // no newline followed
    auto object = parse_json(line);
    TITAN_CHECK(object.is_object() && object.contains("step"), path.string(), ":", number,
                ": not a logged step");
    auto value = [&](const char* key) {
      return object.contains(key) && object[key].is_number() ? object[key].get<double>() : std::nan("");
    };
    steps[object["step"].get<int64_t>()] = {value("loss"), value("tps"), value("step_s")};
  }
  return steps;
}

template <class Field>
double median(const RunRecord& run, Field field) {
  std::vector<double> values;
  for (const auto& [step, logged] : run.steps)
    if (run.steps.size() == 1 || step != run.steps.begin()->first) values.push_back(logged.*field);
  if (values.empty()) return std::nan("");
  auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

std::map<std::string, std::string> settings_of(const std::string& toml) {
  return config::printed_settings(toml);
}

std::string text_of_toml(const std::string& value) {
  const config::Document document = config::read_toml("value = " + value, "");
  if (!document.problems.empty() || document.leaves.size() != 1) return value;
  const auto* text = std::get_if<std::string>(&document.leaves.front().value.value);
  return text ? *text : value;
}

std::string RunRecord::setting(const std::string& key) const {
  auto found = settings.find(key);
  return found == settings.end() ? "unset" : found->second;
}

double RunRecord::median_tps() const { return median(*this, &LoggedStep::tps); }
double RunRecord::median_step_s() const { return median(*this, &LoggedStep::step_s); }

RunRecord read_run(const std::filesystem::path& folder) {
  for (const char* name : {"config.toml", "metrics.jsonl"})
    if (!std::filesystem::exists(folder / name))
      throw ConfigError(str(folder.string(), " holds no run: it has no ", name));
  const auto validations = folder / "validation.jsonl";
  return {folder, settings_of(read_file(folder / "config.toml")), read_steps(folder / "metrics.jsonl"),
          std::filesystem::exists(validations) ? read_steps(validations) : LoggedSteps()};
}

std::set<std::string> keys_of(const std::vector<RunRecord>& runs) {
  std::set<std::string> keys;
  for (const RunRecord& run : runs)
    for (const auto& [key, value] : run.settings) keys.insert(key);
  keys.erase("job.dump_folder");
  return keys;
}

bool same_setting(const std::vector<RunRecord>& runs, const std::string& key) {
  return std::all_of(runs.begin(), runs.end(),
                     [&](const RunRecord& run) { return run.setting(key) == runs.front().setting(key); });
}

std::vector<int64_t> common_steps(const std::vector<RunRecord>& runs, Series series) {
  std::vector<int64_t> steps;
  for (const auto& [step, logged] : runs.front().*series)
    if (std::all_of(runs.begin(), runs.end(),
                    [&, step = step](const RunRecord& run) { return (run.*series).contains(step); }))
      steps.push_back(step);
  return steps;
}

Parting compare_losses(const LoggedSteps& a, const LoggedSteps& b, const std::vector<int64_t>& steps) {
  Parting parting;
  for (int64_t step : steps) {
    double first = a.at(step).loss, second = b.at(step).loss;
    if (first == second || (std::isnan(first) && std::isnan(second))) continue;
    if (!parting.first_step) parting.first_step = step;
    double difference = std::abs(first - second);
    if (difference >= parting.largest_difference) {
      parting.largest_difference = difference;
      parting.largest_step = step;
    }
  }
  return parting;
}

namespace {

namespace fs = std::filesystem;

int64_t bytes_in(const fs::path& folder) {
  int64_t bytes = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (entry.is_regular_file(error)) bytes += static_cast<int64_t>(entry.file_size(error));
  return bytes;
}

CheckpointRow row_of(const checkpoint::StepEntry& entry) {
  CheckpointRow row{
      .step = entry.step,
      .num_bytes = bytes_in(entry.path),
      .written = written_text(entry.has_manifest ? entry.path / checkpoint::kManifestName : entry.path)};
  if (holds_model_only(entry.path)) {
    row.state = "model only";
    return row;
  }
  const std::vector<std::string> problems = checkpoint::quick_problems(entry.path);
  row.usable = problems.empty();
  row.state = problems.empty() ? "complete" : "damaged: " + problems.front();
  return row;
}

}  // namespace

std::vector<CheckpointRow> list_checkpoints(const fs::path& folder) {
  std::vector<CheckpointRow> rows;
  for (const checkpoint::StepEntry& entry : checkpoint::list_steps(folder)) rows.push_back(row_of(entry));
  return rows;
}

std::optional<CheckpointRow> newest_checkpoint(const fs::path& folder) {
  const std::vector<checkpoint::StepEntry> entries = checkpoint::list_steps(folder);
  return entries.empty() ? std::nullopt : std::optional(row_of(entries.back()));
}

}  // namespace titan::cli
