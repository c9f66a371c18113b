// `titan debug events`: prints the structured logs of a run, or writes them as a trace.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "cli/debug/commands.h"
#include "cli/parser.h"
#include "cli/text.h"
#include "core/file.h"
#include "core/json.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

using nlohmann::ordered_json;

using AddEvent = std::function<void(const ordered_json& event)>;

/// Writes one process's events.
class ProcessTrace {
 public:
  ProcessTrace(const AddEvent& add, const ProcessLog& log, int64_t number)
      : add_(add), log_(log), number_(number) {}

  void write() {
    name_process();
    for (const LoggedEvent& event : log_.events) take(event);
    for (const auto& [key, starts] : open_)
      for (const LoggedEvent* start : starts)
        span(*start, log_.last_us() - start->time_us, {{"step", start->step}, {"unfinished", true}});
  }

 private:
  void name_process() {
    const std::string name = str("rank ", log_.rank, " (", log_.host, ", process ", log_.pid, ")");
    add_({{"ph", "M"}, {"name", "process_name"}, {"pid", number_}, {"args", {{"name", name}}}});
    add_(
        {{"ph", "M"}, {"name", "process_sort_index"}, {"pid", number_}, {"args", {{"sort_index", number_}}}});
  }

  void take(const LoggedEvent& event) {
    switch (event.kind) {
      case LoggedEvent::Kind::Start:
        open_[{event.thread, event.name}].push_back(&event);
        return;
      case LoggedEvent::Kind::Error:
        failed_.insert({event.thread, event.name});
        return;
      case LoggedEvent::Kind::End:
        return take_end(event);
      case LoggedEvent::Kind::Instant:
        return take_instant(event);
    }
  }

  // The end has the duration by the steady clock, even if the span's start was rotated away.
  void take_end(const LoggedEvent& event) {
    const std::pair key{event.thread, event.name};
    auto& starts = open_[key];
    int64_t lasted = static_cast<int64_t>(std::llround(event.value.value_or(0) * 1000));
    if (!starts.empty()) {
      if (!event.value) lasted = std::max<int64_t>(0, event.time_us - starts.back()->time_us);
      starts.pop_back();
    }
    ordered_json args = {{"step", event.step}};
    if (failed_.erase(key) > 0) args["failed"] = true;
    LoggedEvent start = event;
    start.time_us -= lasted;
    span(start, lasted, std::move(args));
  }

  void span(const LoggedEvent& start, int64_t lasted_us, ordered_json args) {
    add_({{"ph", "X"},
          {"name", start.name},
          {"cat", "titan"},
          {"ts", start.time_us},
          {"dur", lasted_us},
          {"pid", number_},
          {"tid", start.thread},
          {"args", std::move(args)}});
  }

  void take_instant(const LoggedEvent& event) {
    if (event.value)
      add_({{"ph", "C"},
            {"name", event.name},
            {"ts", event.time_us},
            {"pid", number_},
            {"args", {{event.name, *event.value}}}});
    else
      add_({{"ph", "i"},
            {"s", "p"},
            {"name", event.name},
            {"cat", "titan"},
            {"ts", event.time_us},
            {"pid", number_},
            {"tid", event.thread},
            {"args", {{"step", event.step}}}});
  }

  const AddEvent& add_;
  const ProcessLog& log_;
  int64_t number_;
  std::map<std::pair<int64_t, std::string>, std::vector<const LoggedEvent*>> open_;
  std::set<std::pair<int64_t, std::string>> failed_;
};

namespace fs = std::filesystem;

constexpr const char* kEventsNotes =
    R"(RUN is a run's job.dump_folder, or the folder of its structured logs. Prints where each rank's time went,
by kind of span. --perfetto writes all spans and instants as one trace for ui.perfetto.dev, with the ranks
below each other on one clock. Works while the run is running.
)";

// `ranks`: empty for all.
std::vector<ProcessFiles> wanted_logs(const fs::path& run, const std::set<int>& ranks) {
  const fs::path folder = structured_folder(run);
  if (folder.empty())
    throw ConfigError(
        str("titan debug events: ", run.string(),
            " holds no structured logs (files train.global_rank_*.jsonl, which a run writes unless "
            "metrics.structured_logs.enable is off)"));
  std::vector<ProcessFiles> logs = list_structured_logs(folder);
  std::erase_if(logs,
                [&](const ProcessFiles& files) { return !ranks.empty() && !ranks.contains(files.rank); });
  if (logs.empty()) throw ConfigError(str("titan debug events: no log of these ranks in ", folder.string()));
  return logs;
}

struct SpanSum {
  int64_t count = 0;
  double total_ms = 0, longest_ms = 0;
};

std::string where_time_went(const ProcessLog& log) {
  std::map<std::string, SpanSum> sums;
  for (const LoggedEvent& event : log.events) {
    if (event.kind != LoggedEvent::Kind::End || !event.value) continue;
    SpanSum& sum = sums[event.name];
    ++sum.count;
    sum.total_ms += *event.value;
    sum.longest_ms = std::max(sum.longest_ms, *event.value);
  }
  TextTable table{.rows = {{"span", "count", "total s", "mean ms", "longest ms"}},
                  .right = {false, true, true, true, true}};
  for (const auto& [name, sum] : sums)
    table.rows.push_back({name, std::to_string(sum.count), number("%.3f", sum.total_ms / 1e3),
                          number("%.3f", sum.total_ms / static_cast<double>(sum.count)),
                          number("%.3f", sum.longest_ms)});
  return str("rank ", log.rank, " (", log.host, ", process ", log.pid, ")\n", to_string(table));
}

int print_times(const std::vector<ProcessFiles>& logs, const ReadOptions& options) {
  for (size_t i = 0; i < logs.size(); ++i)
    std::printf("%s%s", i == 0 ? "" : "\n", where_time_went(read_structured_log(logs[i], options)).c_str());
  return 0;
}

int write_trace(const std::vector<ProcessFiles>& logs, const ReadOptions& options, const fs::path& path) {
  size_t at = 0;
  const auto next = [&]() -> std::optional<ProcessLog> {
    if (at == logs.size()) return std::nullopt;
    return read_structured_log(logs[at++], options);
  };
  write_file_atomic(path, [&](const AppendBytes& append) {
    write_perfetto(next, [&](std::string_view text) { append(std::as_bytes(std::span(text))); });
  });
  return print(str(path.string(), ": ", logs.size(), logs.size() == 1 ? " process" : " processes",
                   "; open it at ui.perfetto.dev\n"));
}

}  // namespace

void write_perfetto(const std::function<std::optional<ProcessLog>()>& next,
                    const std::function<void(std::string_view)>& append) {
  bool first = true;
  const AddEvent add = [&](const ordered_json& event) {
    append(std::exchange(first, false) ? "\n" : ",\n");
    append(json_text(event));
  };
  append("{\"displayTimeUnit\": \"ms\", \"traceEvents\": [");
  std::map<int, int64_t> starts;  // by rank, so far
  while (const auto log = next()) {
    // Process numbers of the trace: each restart of a rank adds a million.
    const int64_t number = log->rank + 1'000'000 * starts[log->rank]++;
    ProcessTrace(add, *log, number).write();
  }
  append("\n]}\n");
}

int debug_events(const Arguments& words) {
  fs::path run, perfetto;
  std::vector<int> ranks;
  std::vector<int64_t> steps = {0, INT64_MAX};
  Parser parser("titan debug events", "RUN [--perfetto FILE] [--ranks R,R] [--steps FIRST,LAST]",
                kEventsNotes);
  parser.path("RUN", run, "a run's folder");
  parser.file("--perfetto", perfetto, "write one trace of all ranks");
  parser.value("--ranks", ranks, "R[,R...]", "only these ranks")->delimiter(',');
  parser.value("--steps", steps, "FIRST,LAST", "only events of these steps")->delimiter(',')->expected(2);
  parser.parse(words);
  const std::vector<ProcessFiles> logs = wanted_logs(run, {ranks.begin(), ranks.end()});
  const ReadOptions options{.first_step = steps[0], .last_step = steps[1]};
  return perfetto.empty() ? print_times(logs, options) : write_trace(logs, options, perfetto);
}

}  // namespace titan::cli
