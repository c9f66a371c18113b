#include "cli/run_folder.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <tuple>

#include "cli/text.h"
#include "config/document.h"
#include "core/file.h"
#include "core/json.h"
#include "core/units.h"
#include "titan/config/load.h"
#include "titan/core/error.h"
#include "train/policies/interruption.h"

namespace titan::cli {

namespace {

namespace fs = std::filesystem;

// A TOML string without quotes and escapes; other values as they are, and "" for a key that isn't set.
std::string text_of_toml(const std::string& value) {
  if (value.empty()) return value;
  const config::Document document = config::read_toml("value = " + value, "");
  if (!document.problems.empty() || document.leaves.size() != 1) return value;
  const auto* text = std::get_if<std::string>(&document.leaves.front().value.value);
  return text ? *text : value;
}

}  // namespace

MetricRows::MetricRows(const fs::path& path, const RowOptions& options) {
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

double MetricRows::value_at_step(int64_t step, const char* key) const {
  const auto row = rows_.find(step);
  return row == rows_.end() ? std::nan("") : value(row->second, key).value_or(std::nan(""));
}

std::optional<double> median_after_first(Curve curve) {
  if (curve.empty()) return std::nullopt;
  if (curve.size() > 1) curve.erase(curve.begin());
  const auto middle = curve.begin() + static_cast<std::ptrdiff_t>(curve.size() / 2);
  std::nth_element(curve.begin(), middle, curve.end(),
                   [](const auto& a, const auto& b) { return a.second < b.second; });
  return middle->second;
}

std::string to_json(const LastingMemory& memory, int64_t step) {
  return nlohmann::json{{"step", step},
                        {"rank", 0},
                        {"parameters_gib", memory.parameters},
                        {"gradients_gib", memory.gradients},
                        {"optimizer_gib", memory.optimizer}}
             .dump(1) +
         "\n";
}

std::optional<LastingMemory> read_memory_file(const std::filesystem::path& run) try {
  const nlohmann::json memory = nlohmann::json::parse(read_file(run / kMemoryFile));
  return LastingMemory{.parameters = memory.at("parameters_gib"),
                       .gradients = memory.at("gradients_gib"),
                       .optimizer = memory.at("optimizer_gib")};
} catch (const Error&) {
  return std::nullopt;
} catch (const nlohmann::json::exception&) {
  return std::nullopt;
}

RunPlan read_plan(const std::string& text) try {
  const nlohmann::json plan = nlohmann::json::parse(text);
  // Rank 0 is always planned.
  const nlohmann::json& roles = plan.at("memory").at("by_role");
  const auto first = std::ranges::find_if(roles, [](const auto& each) { return each.at("rank") == 0; });
  TITAN_CHECK(first != roles.end(), "a plan has rank 0");
  const nlohmann::json& memory = *first;
  const nlohmann::json& times = plan.at("time_by_role");
  const std::string role = memory.value("role", "");
  const auto of_first =
      std::ranges::find_if(times, [&](const auto& each) { return each.value("role", role) == role; });
  const nlohmann::json& time = of_first == times.end() ? times.at(0) : *of_first;
  const auto lasting = [&](const char* category) {
    return memory.at("after_step").at(category).get<double>() / kGiB;
  };
  RunPlan found{.device = plan.at("device"),
                .world_size = plan.at("world"),
                .step_s = plan.at("step_s"),
                .tps = plan.at("tokens_per_s_per_device"),
                .mfu = 100 * plan.at("mfu").get<double>(),
                .reserved_gib = memory.at("peak_reserved_bytes").get<double>() / kGiB,
                .allocated_gib = memory.at("peak_allocated_bytes").get<double>() / kGiB,
                .compute_s = time.at("compute"),
                .optimizer_s = time.at("optimizer"),
                .exposed_communication_s = time.at("exposed_communication"),
                .bubble_s = time.at("bubble"),
                .host_s = time.at("host"),
                .lasting = {.parameters = lasting("parameters"),
                            // The plan's category has the buffers of reductions, too.
                            .gradients = memory.at("shard_gradient_bytes").get<double>() / kGiB,
                            .optimizer = lasting("optimizer")}};
  found.has_parts_of_rank_0 = of_first != times.end();
  found.notes = plan.value("notes", found.notes);
  for (const nlohmann::json& each : roles)
    found.peaks.push_back(
        {each.at("role"), each.at("rank"), each.at("peak_reserved_bytes").get<double>() / kGiB});
  std::ranges::sort(found.peaks, {}, &PlannedPeak::rank);
  for (const auto& [category, bytes] : memory.at("at_peak").at("categories").items()) {
    const double lasts = category == "parameters"  ? found.lasting.parameters
                         : category == "gradients" ? found.lasting.gradients
                         : category == "optimizer" ? found.lasting.optimizer
                                                   : 0;
    const double gib = bytes.get<double>() / kGiB - lasts;
    if (gib >= 0.005)
      found.rest.emplace_back(category == "gradients" ? "gradients on their way to shards" : category, gib);
  }
  TITAN_CHECK(
      found.step_s > 0 && found.tps > 0 &&
          std::ranges::all_of(found.peaks, [](const PlannedPeak& peak) { return peak.reserved_gib > 0; }),
      "a plan's figures are above 0");
  return found;
} catch (const nlohmann::json::exception& error) {
  throw Error(str("this isn't what titan plan --json prints: ", error.what()));
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

fs::path RunFolder::folder_of(const std::string& key, const std::string& usual) const {
  const std::string name = text_setting(key);
  return folder / (name.empty() ? usual : name);
}

RunFolder read_run_folder(const fs::path& folder, const RowOptions& options) {
  if (!fs::exists(folder / "config.toml"))
    throw ConfigError(str(folder.string(), " holds no run: it has no config.toml"));
  return {folder, config::printed_settings(read_file(folder / "config.toml")),
          MetricRows(folder / "metrics.jsonl", options), MetricRows(folder / "validation.jsonl", options)};
}

fs::path folder_of_setting(const fs::path& run, const std::string& key, const std::string& usual) {
  RunFolder found{.folder = run, .settings = {}, .steps = {}, .validations = {}};
  if (fs::exists(run / "config.toml"))
    found.settings = config::printed_settings(read_file(run / "config.toml"));
  return found.folder_of(key, usual);
}

namespace {

// A process whose last event is younger is reported as running, not as silent.
constexpr int64_t kSilence_us = 120'000'000;
constexpr int64_t kStartSkew_us = 30'000'000;  // between the ranks of one start, including their clocks
constexpr int64_t kErrorTail = 64 << 10;

// A process that began at step 1, without a checkpoint to resume from, replaced the earlier run.
size_t newest_beginning(const std::vector<ProcessLog>& processes) {
  for (size_t i = processes.size(); i-- > 0;)
    if (steps_of(processes[i]).first == 1) return i;
  return 0;
}

std::vector<ProcessLog> read_rank_0(const fs::path& run) {
  std::vector<ProcessLog> processes;
  for (const ProcessFiles& files : list_structured_logs(structured_folder(run)))
    if (files.rank == 0) processes.push_back(read_structured_log(files));
  std::erase_if(processes, [](const ProcessLog& log) { return log.events.empty(); });
  processes.erase(processes.begin(),
                  processes.begin() + static_cast<std::ptrdiff_t>(newest_beginning(processes)));
  return processes;
}

// Whether the event ends a phase that only a trained step has.
bool ends_training_phase(const LoggedEvent& event) {
  return event.kind == LoggedEvent::Kind::End &&
         (event.name == "fwd_bwd" || event.name == "optim" || event.name == "collect_dist_metrics");
}

// The first error of any rank while this process ran.
std::optional<RankError> first_error(const ProcessLog& process, const std::vector<RankError>& others,
                                     int64_t next_start_us) {
  std::optional<RankError> first;
  const auto take = [&](const RankError& error) {
    if (!first || error.event.time_us < first->event.time_us) first = error;
  };
  for (const RankError& error : errors_in({process})) take(error);
  for (const RankError& error : others)
    if (error.event.time_us >= process.first_us() && error.event.time_us < next_start_us) take(error);
  return first;
}

// A rank that fails ends the job before rank 0 can log its end. For such starts, reads the ends of the other
// ranks' logs.
std::vector<RankError> read_errors(const RunHistory& run) {
  std::vector<std::pair<int64_t, int64_t>> unexplained;
  for (size_t i = 0; i < run.processes.size(); ++i)
    if (!run.processes[i].last("teardown", LoggedEvent::Kind::End))
      unexplained.emplace_back(
          run.processes[i].first_us() - kStartSkew_us,
          i + 1 < run.processes.size() ? run.processes[i + 1].first_us() - kStartSkew_us : INT64_MAX);
  std::vector<ProcessLog> logs;
  for (const ProcessFiles& files : list_structured_logs(structured_folder(run.folder))) {
    const int64_t start = start_us(files);
    const bool is_wanted = std::any_of(unexplained.begin(), unexplained.end(), [&](const auto& times) {
      return start >= times.first && start < times.second;
    });
    if (files.rank > 0 && is_wanted)
      logs.push_back(read_structured_log(files, {.spans = false, .tail_bytes = kErrorTail}));
  }
  return errors_in(logs);
}

}  // namespace

RunHistory read_history(const fs::path& folder) {
  RunHistory run{read_run_folder(folder), read_rank_0(folder), {}};
  run.errors = read_errors(run);
  return run;
}

std::vector<RankError> errors_in(const std::vector<ProcessLog>& ranks) {
  std::vector<RankError> errors;
  for (const ProcessLog& rank : ranks)
    for (const LoggedEvent& event : rank.events)
      if (event.kind == LoggedEvent::Kind::Error) errors.push_back({rank.rank, rank.host, event});
  return errors;
}

ProcessEnd end_of(const ProcessLog& process, int64_t now, const std::vector<RankError>& errors,
                  int64_t next_start_us) {
  const bool tore_down = process.last("teardown", LoggedEvent::Kind::End) != nullptr;
  // Other ranks' errors count if they kept this process from ending.
  const auto error = first_error(process, tore_down ? std::vector<RankError>() : errors, next_start_us);
  if (error) {
    const bool is_own = error->rank == process.rank;
    const int64_t step = error->event.step;
    return {ProcessEnd::Kind::Failed,
            str("an error in ", error->event.name, step > 0 ? str(" of step ", step) : "",
                is_own ? "" : str(" on rank ", error->rank, " (", error->host, ")"))};
  }
  if (const LoggedEvent* stopped = process.last("stopped"); stopped && tore_down)
    return {ProcessEnd::Kind::Stopped,
            str("stopped by ", train::signal_name(static_cast<int>(stopped->value.value_or(0))))};
  if (tore_down) return {ProcessEnd::Kind::Completed, "completed"};
  if (next_start_us != INT64_MAX) return {ProcessEnd::Kind::Silent, "killed or lost"};
  const int64_t silent_us = now - process.last_us();
  if (silent_us < kSilence_us) return {ProcessEnd::Kind::Silent, "running"};
  // It may be in a long save or validation, or killed: files can't tell which.
  const std::string phase = phase_of(process);
  return {ProcessEnd::Kind::Silent, str("silent for ", duration(static_cast<double>(silent_us) * 1e-6),
                                        phase.empty() ? "" : ", in " + phase)};
}

ProcessEnd end_of(const RunHistory& run, size_t i, int64_t now) {
  const bool is_last = i + 1 == run.processes.size();
  return end_of(run.processes[i], now, run.errors, is_last ? INT64_MAX : run.processes[i + 1].first_us());
}

bool is_failed_restart(const ProcessEnd& end, const ProcessLog& process, const RunFolder& run) {
  return end.kind == ProcessEnd::Kind::Failed && steps_of(process).first == 0 && run.total_steps() > 0 &&
         run.steps.last_step() == run.total_steps();
}

std::string phase_of(const ProcessLog& process) {
  std::vector<std::string> open;
  for (const LoggedEvent& event : process.events) {
    if (event.kind == LoggedEvent::Kind::Start) open.push_back(event.name);
    if (event.kind != LoggedEvent::Kind::End) continue;
    const auto at = std::find(open.rbegin(), open.rend(), event.name);
    if (at != open.rend()) open.erase(at.base() - 1, open.end());
  }
  return open.empty() ? "" : open.back();
}

StepRange steps_of(const ProcessLog& process) {
  StepRange range;
  bool made = false;
  for (const LoggedEvent& event : process.events) {
    // This also works if the log's beginning has been rotated away.
    if (range.first == 0 && event.relative_step > 0)
      range.first = std::max<int64_t>(1, event.step - event.relative_step + 1);
    if (event.name == "step" && event.kind == LoggedEvent::Kind::Start) made = false;
    if (ends_training_phase(event)) made = true;
    if (event.name != "step") continue;
    if (range.first == 0) range.first = event.step;
    if (event.kind == LoggedEvent::Kind::End && made) range.last = event.step;
  }
  return range;
}

std::vector<ProcessFiles> newest_files(const fs::path& run, size_t most_ranks) {
  std::map<int, ProcessFiles> newest;
  for (ProcessFiles& files : list_structured_logs(structured_folder(run)))
    newest[files.rank] = std::move(files);
  // A run that resumed with fewer ranks has left the other ranks' logs.
  if (const auto rank_0 = newest.find(0); rank_0 != newest.end()) {
    const auto environment = read_structured_log(rank_0->second, {.tail_bytes = 0}).environment;
    const auto size = environment.find("world_size");
    if (size != environment.end() && size->is_number_integer())
      newest.erase(newest.lower_bound(size->get<int>()), newest.end());
  }
  std::vector<ProcessFiles> files;
  const size_t stride = std::max<size_t>(1, (newest.size() + most_ranks - 1) / most_ranks);
  size_t at = 0;
  for (auto& [rank, log] : newest)
    if (at++ % stride == 0) files.push_back(std::move(log));
  return files;
}

std::vector<ProcessLog> newest_of_ranks(const fs::path& run, size_t most_ranks, const ReadOptions& options) {
  std::vector<ProcessLog> ranks;
  for (const ProcessFiles& files : newest_files(run, most_ranks))
    ranks.push_back(read_structured_log(files, options));
  return ranks;
}

int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

namespace {

int64_t size_of(const fs::path& path) {
  std::error_code error;
  const auto size = fs::file_size(path, error);
  return error ? 0 : static_cast<int64_t>(size);
}

constexpr int64_t kFarTail = 8 << 20;  // more than a thousand steps; read once

constexpr std::array kFigures = {"memory_gib", "memory_percent", "own_s", "wait_s", "straggler"};

// Adds the last value of each metric that `log` lacks.
void take_figures(ProcessLog& log, const ProcessLog& earlier) {
  std::vector<LoggedEvent> missing;
  for (const char* name : kFigures) {
    const LoggedEvent* last = earlier.last(name);
    if (last && !log.last(name)) missing.push_back(*last);
  }
  log.events.insert(log.events.begin(), missing.begin(), missing.end());
}

}  // namespace

ProcessLog RankTails::read_one(const ProcessFiles& files, const Known* before) const {
  ProcessLog log = read_structured_log(files, {.tail_bytes = tail_bytes_});
  if (before)
    take_figures(log, before->log);
  else if (!log.last("memory_gib"))
    take_figures(log, read_structured_log(files, {.spans = false, .tail_bytes = kFarTail}));
  return log;
}

std::vector<ProcessLog> RankTails::read(const std::filesystem::path& run) {
  std::map<int, Known> now;
  std::vector<ProcessLog> logs;
  for (const ProcessFiles& files : newest_files(run, most_ranks_)) {
    const auto& path = files.paths.back();
    const int64_t size = size_of(path);
    const auto before = known_.find(files.rank);
    const bool is_same = before != known_.end() && before->second.path == path;
    if (is_same && before->second.size == size)
      now[files.rank] = std::move(before->second);
    else
      now[files.rank] = {path, size, read_one(files, is_same ? &before->second : nullptr)};
    logs.push_back(now[files.rank].log);
  }
  known_ = std::move(now);
  return logs;
}

namespace {

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

std::string text_member(const ordered_json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

LoggedEvent event_of(const ordered_json& object) {
  LoggedEvent event;
  event.name = text_member(object, "log_type_name");
  event.time_us = json_integer(object, "time_us");
  event.step = json_integer(object, "step");
  event.thread = json_integer(object, "tid");
  event.relative_step = json_integer(object, "relative_step");
  if (const auto value = object.find("value"); value != object.end() && value->is_number())
    event.value = value->get<double>();
  if (text_member(object, "log_type") == "event") take_suffix(event);
  return event;
}

void take_line(ProcessLog& log, const std::string& line, const ReadOptions& options) {
  if (!options.spans && line.find("\"log_type\": \"event\"") != std::string::npos &&
      line.find("_error\"") == std::string::npos)
    return;
  const ordered_json object = parse_json<ordered_json>(line);
  if (!object.is_object() || json_integer(object, "time_us") == 0) return;
  if (log.host.empty()) {
    log.host = text_member(object, "host_name");
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

const LoggedEvent* ProcessLog::last(const std::string& name, std::optional<LoggedEvent::Kind> kind) const {
  const auto found = std::find_if(events.rbegin(), events.rend(), [&](const LoggedEvent& event) {
    return event.name == name && (!kind || event.kind == *kind);
  });
  return found == events.rend() ? nullptr : &*found;
}

std::string ProcessLog::world_size() const {
  const auto size = environment.find("world_size");
  return size != environment.end() ? size->dump() : "";
}

std::optional<double> ProcessLog::value(const std::string& name) const {
  const LoggedEvent* event = last(name);
  return event ? event->value : std::nullopt;
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

RunFolder read_compared_run(const std::filesystem::path& folder) {
  for (const char* name : {"config.toml", "metrics.jsonl"})
    if (!std::filesystem::exists(folder / name))
      throw ConfigError(str(folder.string(), " holds no run: it has no ", name));
  return read_run_folder(folder, {.bad_lines = BadLines::Refuse});
}

std::set<std::string> keys_of(const std::vector<RunFolder>& runs) {
  std::set<std::string> keys;
  for (const RunFolder& run : runs)
    for (const auto& [key, value] : run.settings) keys.insert(key);
  keys.erase("job.dump_folder");
  return keys;
}

std::vector<int64_t> common_steps(const std::vector<RunFolder>& runs, Series series) {
  std::set<int64_t> steps;
  const MetricRows& first = runs.front().*series;
  for (size_t row = 0; row < first.size(); ++row)
    if (std::ranges::all_of(runs,
                            [&](const RunFolder& run) { return (run.*series).has_step(first.step(row)); }))
      steps.insert(first.step(row));
  return {steps.begin(), steps.end()};
}

LossDifference compare_losses(const MetricRows& a, const MetricRows& b, const std::vector<int64_t>& steps) {
  LossDifference found;
  for (int64_t step : steps) {
    const double first = a.value_at_step(step, "loss"), second = b.value_at_step(step, "loss");
    if (first == second || (std::isnan(first) && std::isnan(second))) continue;
    if (!found.first_step) found.first_step = step;
    const double difference = std::abs(first - second);
    if (difference >= found.largest_difference) {
      found.largest_difference = difference;
      found.largest_step = step;
    }
  }
  return found;
}

}  // namespace titan::cli
