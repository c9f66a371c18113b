#include "cli/run/rank_tails.h"

#include <array>

#include "cli/run/run_history.h"

namespace titan::cli {

namespace {

constexpr int64_t kFarTail = 8 << 20;  // a thousand steps and more, read once

constexpr std::array kFigures = {"memory_gib", "memory_percent", "own_s", "wait_s", "straggler"};

// The last of each that `log` lacks.
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
    std::error_code error;
    const auto& path = files.paths.back();
    const uintmax_t size = std::filesystem::file_size(path, error);
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

}  // namespace titan::cli
