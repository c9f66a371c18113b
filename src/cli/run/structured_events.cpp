#include "cli/run/structured_events.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <map>
#include <tuple>

#include "cli/run/run_folder.h"
#include "core/json_tree.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr std::string_view kPrefix = "train.global_rank_";
constexpr std::string_view kEarlier = ".earlier.jsonl";
constexpr std::string_view kCurrent = ".jsonl";

// "train.global_rank_3.20261121-234000-123456-a1b2c3.jsonl": 3
std::optional<int> rank_in(const std::string& name) {
  if (!name.starts_with(kPrefix) || !name.ends_with(kCurrent)) return std::nullopt;
  const size_t end = name.find('.', kPrefix.size());
  const std::string digits = name.substr(kPrefix.size(), end - kPrefix.size());
  if (digits.empty() || digits.size() > 9 || digits.find_first_not_of("0123456789") != std::string::npos)
    return std::nullopt;
  return std::stoi(digits);
}

void take_suffix(LoggedEvent& event) {
  static const std::array<std::pair<std::string_view, LoggedEvent::Kind>, 3> suffixes = {
      {{"_start", LoggedEvent::Kind::Start},
       {"_end", LoggedEvent::Kind::End},
       {"_error", LoggedEvent::Kind::Error}}};
  for (const auto& [suffix, kind] : suffixes) {
    if (!event.name.ends_with(suffix)) continue;
    event.name.resize(event.name.size() - suffix.size());
    event.kind = kind;
    return;
  }
}

int64_t json_integer(const ordered_json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
}

std::string json_text(const ordered_json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

LoggedEvent event_of(const ordered_json& object) {
  LoggedEvent event;
  event.name = json_text(object, "log_type_name");
  event.time_us = json_integer(object, "time_us");
  event.step = json_integer(object, "step");
  event.thread = json_integer(object, "tid");
  event.relative_step = json_integer(object, "relative_step");
  if (const auto value = object.find("value"); value != object.end() && value->is_number())
    event.value = value->get<double>();
  if (json_text(object, "log_type") == "event") take_suffix(event);
  return event;
}

void take_line(ProcessLog& log, const std::string& line, const ReadOptions& options) {
  if (!options.spans && line.find("\"log_type\": \"event\"") != std::string::npos &&
      line.find("_error\"") == std::string::npos)
    return;
  const ordered_json object = parse_json<ordered_json>(line);
  if (!object.is_object() || json_integer(object, "time_us") == 0) return;
  if (log.host.empty()) {
    log.host = json_text(object, "host_name");
    log.pid = json_integer(object, "pid");
  }
  if (const auto environment = object.find("environment"); environment != object.end()) {
    if (environment->is_object()) log.environment = *environment;
    return;
  }
  LoggedEvent event = event_of(object);
  if (event.step >= options.first_step && event.step <= options.last_step)
    log.events.push_back(std::move(event));
}

// Skips from after the first line to the tail.
void skip_to_tail(std::ifstream& file, int64_t size, int64_t tail_bytes) {
  if (tail_bytes < 0 || size <= tail_bytes || file.tellg() >= size - tail_bytes - 1) return;
  file.seekg(size - tail_bytes - 1);  // a line that begins there is whole
  std::string rest;
  std::getline(file, rest);
}

int64_t size_of(const fs::path& path) {
  std::error_code error;
  const auto size = fs::file_size(path, error);
  return error ? 0 : static_cast<int64_t>(size);
}

void read_lines(ProcessLog& log, const fs::path& path, const ReadOptions& options) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return;
  take_line(log, line, options);
  skip_to_tail(file, size_of(path), options.tail_bytes);
  while (std::getline(file, line))
    if (!file.eof()) take_line(log, line, options);
}

}  // namespace

const LoggedEvent* ProcessLog::last(const std::string& name) const {
  const auto found = std::find_if(events.rbegin(), events.rend(),
                                  [&](const LoggedEvent& event) { return event.name == name; });
  return found == events.rend() ? nullptr : &*found;
}

fs::path structured_folder(const fs::path& folder) {
  const fs::path named = folder_of_setting(folder, "metrics.structured_logs.folder", "structured_logs");
  if (fs::is_directory(named)) return named;
  return list_structured_logs(folder).empty() ? fs::path() : folder;
}

int64_t start_us(const ProcessFiles& files) {
  // "train.global_rank_3.20261121-234000-123456-a1b2c3"
  std::tm utc = {};
  long microseconds = 0;
  const size_t time = files.stem.find('.', kPrefix.size());
  if (time == std::string::npos) return 0;
  const char* rest = ::strptime(files.stem.c_str() + time + 1, "%Y%m%d-%H%M%S", &utc);
  if (!rest || std::sscanf(rest, "-%6ld-", &microseconds) != 1) return 0;
  return int64_t{::timegm(&utc)} * 1'000'000 + microseconds;
}

std::vector<ProcessFiles> list_structured_logs(const fs::path& folder) {
  std::map<std::tuple<int, std::string>, ProcessFiles> processes;
  if (!fs::is_directory(folder)) return {};
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    const auto rank = rank_in(name);
    if (!rank) continue;
    const bool earlier = name.ends_with(kEarlier);
    const std::string stem = name.substr(0, name.size() - (earlier ? kEarlier : kCurrent).size());
    ProcessFiles& files = processes[{*rank, stem}];
    files.rank = *rank;
    files.stem = stem;
    files.paths.insert(earlier ? files.paths.begin() : files.paths.end(), entry.path());
  }
  std::vector<ProcessFiles> list;
  for (auto& [key, files] : processes) list.push_back(std::move(files));
  return list;
}

ProcessLog read_structured_log(const ProcessFiles& files, const ReadOptions& options) {
  ProcessLog log;
  log.rank = files.rank;
  log.environment = ordered_json::object();
  // Right after a rotation most of the tail is in the earlier file.
  std::vector<ReadOptions> parts(files.paths.size(), options);
  for (size_t i = files.paths.size(); options.tail_bytes >= 0 && i-- > 1;)
    parts[i - 1].tail_bytes = std::max<int64_t>(0, parts[i].tail_bytes - size_of(files.paths[i]));
  for (size_t i = 0; i < files.paths.size(); ++i) read_lines(log, files.paths[i], parts[i]);
  // The line of a span that began before the log did may follow later ones.
  std::stable_sort(log.events.begin(), log.events.end(),
                   [](const LoggedEvent& a, const LoggedEvent& b) { return a.time_us < b.time_us; });
  return log;
}

}  // namespace titan::cli
