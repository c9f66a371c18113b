#include "cli/debug/perfetto.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "titan/core/error.h"

namespace titan::cli {

namespace {

using nlohmann::ordered_json;

/// Writes the objects of "traceEvents".
class TraceWriter {
 public:
  explicit TraceWriter(const std::function<void(std::string_view)>& append) : append_(append) {
    append_("{\"displayTimeUnit\": \"ms\", \"traceEvents\": [");
  }
  void add(const ordered_json& object) {
    append_(first_ ? "\n" : ",\n");
    append_(object.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
    first_ = false;
  }
  void end() { append_("\n]}\n"); }

 private:
  const std::function<void(std::string_view)>& append_;
  bool first_ = true;
};

/// One process's events.
class ProcessTrace {
 public:
  ProcessTrace(TraceWriter& writer, const ProcessLog& log, int64_t number)
      : writer_(writer), log_(log), number_(number) {}

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
    writer_.add({{"ph", "M"}, {"name", "process_name"}, {"pid", number_}, {"args", {{"name", name}}}});
    writer_.add(
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

  // The end knows how long it took, by a clock that nobody sets, and also where its start was rotated away.
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
    writer_.add({{"ph", "X"},
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
      writer_.add({{"ph", "C"},
                   {"name", event.name},
                   {"ts", event.time_us},
                   {"pid", number_},
                   {"args", {{event.name, *event.value}}}});
    else
      writer_.add({{"ph", "i"},
                   {"s", "p"},
                   {"name", event.name},
                   {"cat", "titan"},
                   {"ts", event.time_us},
                   {"pid", number_},
                   {"tid", event.thread},
                   {"args", {{"step", event.step}}}});
  }

  TraceWriter& writer_;
  const ProcessLog& log_;
  int64_t number_;
  std::map<std::pair<int64_t, std::string>, std::vector<const LoggedEvent*>> open_;
  std::set<std::pair<int64_t, std::string>> failed_;
};

}  // namespace

void write_perfetto(const std::function<std::optional<ProcessLog>()>& next,
                    const std::function<void(std::string_view)>& append) {
  TraceWriter writer(append);
  std::map<int, int64_t> starts;  // of a rank, so far
  while (const auto log = next()) {
    // A trace's process numbers: those of a rank that was started again follow a million later.
    const int64_t number = log->rank + 1'000'000 * starts[log->rank]++;
    ProcessTrace(writer, *log, number).write();
  }
  writer.end();
}

}  // namespace titan::cli
