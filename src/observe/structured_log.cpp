#include "observe/structured_log.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/threads.h"
#include "observe/structured_file.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/train/run_observer.h"

namespace titan::train {

namespace {

constexpr auto kWritePeriod = std::chrono::seconds(1);
constexpr size_t kWriteEvents = 200;  // 64 KiB of lines
// Only a stalled disk lets more events queue up.
constexpr size_t kMostQueued = size_t{1} << 18;
constexpr size_t kMostInOneWrite = size_t{256} << 10;
constexpr const char* kPostData = "post_dataloading_process";
constexpr const char* kTrainer = "titan::train::Trainer";

// TorchTitan's names for the phases.
const char* span_name(Phase phase) {
  static constexpr std::array names = {
      "checkpoint_load", "step", "fetching_batch", "fwd_bwd", "optim", "collect_dist_metrics",
      "checkpoint_save", "eval", "check_replicas", "teardown"};
  return names[static_cast<size_t>(phase)];
}

}  // namespace

void describe(config::Table<StructuredLogSettings>& table) {
  table.field("enable", &StructuredLogSettings::enable,
              "each rank writes what it does over time, one JSON object per event");
  table.field("folder", &StructuredLogSettings::folder, "folder of these files, under job.dump_folder");
  table.field("max_mib", &StructuredLogSettings::max_mib,
              "most MiB of one process's events; beyond that the older half is dropped", config::at_least(1));
  table.field("keep_latest_k", &StructuredLogSettings::keep_latest_k,
              "how many processes of each rank keep their logs, the newest ones (a restart is a new process)",
              config::at_least(1));
}

struct StructuredLog::Impl {
  explicit Impl(Options given)
      : options(std::move(given)),
        lines(options.rank, options.local_rank),
        file(options.folder, structured_stem(options.rank), options.max_bytes) {
    const SignalsBlocked blocked;
    writer = std::thread([this] { write_until_ended(); });
  }
  ~Impl() {
    {
      std::lock_guard lock(mutex);
      ending = true;
    }
    wake.notify_one();
    writer.join();
  }

  // Called under the lock:
  pid_t calling_thread();
  void push(StructuredEvent event);
  void push_end(StructuredEvent event);
  void end_post_data(int64_t now);
  // Called by the writer thread:
  bool is_due() const { return ending || flushes_done < flushes_wanted || queue.size() >= kWriteEvents; }
  void write_until_ended();
  void write(const std::vector<StructuredEvent>& events, int64_t lost);
  void open();
  void append(const std::vector<StructuredEvent>& events);

  Options options;
  std::mutex mutex;  // guards everything up to the writer's own fields
  std::condition_variable wake, written;
  std::vector<StructuredEvent> queue;
  int64_t dropped = 0;
  bool ending = false;
  uint64_t flushes_wanted = 0, flushes_done = 0;
  int64_t step = 0, relative_step = 0;
  uint8_t tags = 0;
  pid_t last_thread = 0;
  std::thread::id last_thread_id;
  std::map<std::pair<pid_t, std::string_view>, int64_t> open_spans;  // steady ns
  std::array<int64_t, static_cast<size_t>(Phase::Finish) + 1> open_phases{};
  int64_t post_data_ns = 0;  // when the batches arrived, until the forward begins; else 0
  // The writer's own fields.
  EventLines lines;
  StructuredFile file;
  std::string text;
  bool failed = false;
  int64_t retry_ns = 0, lost_events = 0;
  std::thread writer;  // last: it uses all of the above
};

// Remembers the last thread: the system call costs more than the rest of an event, and nearly all events come
// from the training thread.
pid_t StructuredLog::Impl::calling_thread() {
  if (const auto id = std::this_thread::get_id(); id != last_thread_id) {
    last_thread_id = id;
    last_thread = static_cast<pid_t>(::syscall(SYS_gettid));
  }
  return last_thread;
}

void StructuredLog::Impl::push(StructuredEvent event) {
  event.thread = calling_thread();
  if (event.step == 0) event.step = step;
  event.relative_step = relative_step;
  event.step_tags = tags;
  if (queue.size() >= kMostQueued) {
    ++dropped;
    return;
  }
  queue.push_back(event);
  if (queue.size() == kWriteEvents) wake.notify_one();
}

void StructuredLog::Impl::write_until_ended() {
  std::vector<StructuredEvent> events;
  std::unique_lock lock(mutex);
  for (bool last = false; !last;) {
    wake.wait_for(lock, kWritePeriod, [this] { return is_due(); });
    last = ending;
    const uint64_t flushes = flushes_wanted;
    events.clear();
    events.swap(queue);
    const int64_t lost = std::exchange(dropped, 0);
    lock.unlock();
    write(events, lost);
    lock.lock();
    flushes_done = flushes;
    written.notify_all();
  }
}

// The run doesn't depend on its log: a full disk only costs the events that come meanwhile.
void StructuredLog::Impl::write(const std::vector<StructuredEvent>& events, int64_t lost) {
  lost_events += lost;
  if (events.empty() && file.is_open() && lost_events == 0) return;
  if (failed && steady_now_ns() < retry_ns) {
    lost_events += static_cast<int64_t>(events.size());
    return;
  }
  try {
    open();
    append(events);
    if (std::exchange(failed, false)) log::info("the structured log continues");
  } catch (const std::exception& error) {
    if (!failed)
      log::warning(str("the structured log has a gap from here on; the run continues: ", error.what()));
    failed = true;
    file.close();
    retry_ns = steady_now_ns() + std::chrono::nanoseconds(options.retry).count();
    lost_events += static_cast<int64_t>(events.size());
  }
}

void StructuredLog::Impl::open() {
  lines.set_clock();
  if (failed) return file.reopen(lines.process_line(options.environment));
  if (file.is_open()) return;
  file.open(lines.process_line(options.environment));
  remove_old_logs(options.folder, options.rank, options.kept_processes);
}

void StructuredLog::Impl::append(const std::vector<StructuredEvent>& events) {
  text.clear();
  const auto write_out = [&] {
    if (file.is_full()) file.open(lines.process_line(options.environment));
    file.append(text);
    text.clear();
  };
  if (lost_events > 0)
    lines.append(text, {.name = "events_dropped",
                        .caller = "titan::train::StructuredLog",
                        .steady_ns = steady_now_ns(),
                        .value = static_cast<double>(lost_events)});
  const size_t most = std::min(kMostInOneWrite, static_cast<size_t>(options.max_bytes / 8));
  for (const StructuredEvent& event : events) {
    lines.append(text, event);
    if (text.size() >= most) write_out();
  }
  if (!text.empty()) write_out();
  lost_events = 0;
}

StructuredLog::StructuredLog(Options options) : impl_(std::make_unique<Impl>(std::move(options))) {}
StructuredLog::~StructuredLog() = default;

void StructuredLog::begin(Phase phase, int64_t step) {
  const int64_t now = steady_now_ns();
  std::lock_guard lock(impl_->mutex);
  impl_->end_post_data(now);
  if (phase == Phase::Step) {
    impl_->step = step;
    impl_->tags = 0;
    if (++impl_->relative_step == 1)
      impl_->push({.name = "training_start", .caller = kTrainer, .steady_ns = now});
  }
  if (phase == Phase::Save) impl_->tags |= kSavesTag;
  if (phase == Phase::Validate) impl_->tags |= kValidatesTag;
  impl_->open_phases[static_cast<size_t>(phase)] = now;
  impl_->push({.name = span_name(phase), .caller = kTrainer, .steady_ns = now, .kind = EventKind::Start});
}

void StructuredLog::end(Phase phase, int64_t /*step*/, bool failed) {
  const int64_t now = steady_now_ns();
  std::lock_guard lock(impl_->mutex);
  impl_->end_post_data(now);
  const auto elapsed = static_cast<double>(now - impl_->open_phases[static_cast<size_t>(phase)]);
  impl_->push_end({.name = span_name(phase),
                   .caller = kTrainer,
                   .steady_ns = now,
                   .value = elapsed * 1e-6,
                   .kind = failed ? EventKind::Error : EventKind::End});
  if (phase != Phase::Data || failed) return;
  impl_->post_data_ns = now;
  impl_->push({.name = kPostData, .caller = kTrainer, .steady_ns = now, .kind = EventKind::Start});
}

// The span between a step's batches and its forward: the ranks sum their token counts there, so all of them
// wait for the rank whose data arrives last.
void StructuredLog::Impl::end_post_data(int64_t now) {
  const int64_t began = std::exchange(post_data_ns, 0);
  if (began > 0)
    push({.name = kPostData,
          .caller = kTrainer,
          .steady_ns = now,
          .value = static_cast<double>(now - began) * 1e-6,
          .kind = EventKind::End});
}

// A failed span has an _error before its _end.
void StructuredLog::Impl::push_end(StructuredEvent event) {
  if (event.kind == EventKind::Error) {
    push(event);
    event.kind = EventKind::End;
  }
  push(event);
}

void StructuredLog::logged(const StepMetrics& metrics) {
  const char* caller = "titan::train::MetricsLogger";
  instant("loss", metrics.loss, caller);
  instant("grad_norm", metrics.grad_norm, caller);
  instant("tps", metrics.tps, caller);
  instant("step_s", metrics.step_s, caller);
  instant("data_loading_s", metrics.data_loading_s, caller);
  instant("memory_gib", metrics.memory_gib, caller);
  instant("memory_percent", metrics.memory_percent, caller);
  instant("local_valid_tokens", static_cast<double>(metrics.local_valid_tokens), caller);
  instant("global_valid_tokens", static_cast<double>(metrics.global_valid_tokens), caller);
}

void StructuredLog::stopped(int signal) { instant("stopped", signal, kTrainer); }

void StructuredLog::instant(const char* name, std::optional<double> value, const char* caller) {
  const int64_t now = steady_now_ns();
  std::lock_guard lock(impl_->mutex);
  StructuredEvent event{.name = name, .caller = caller, .steady_ns = now};
  if (value) event.value = *value;
  impl_->push(event);
}

void StructuredLog::start_span(const char* name, const char* caller) {
  const int64_t now = steady_now_ns();
  std::lock_guard lock(impl_->mutex);
  impl_->push({.name = name, .caller = caller, .steady_ns = now, .kind = EventKind::Start});
  impl_->open_spans[{impl_->calling_thread(), name}] = now;
}

void StructuredLog::end_span(const char* name, bool failed, const char* caller) {
  const int64_t now = steady_now_ns();
  std::lock_guard lock(impl_->mutex);
  const auto start = impl_->open_spans.find({impl_->calling_thread(), name});
  const int64_t began = start == impl_->open_spans.end() ? now : start->second;
  impl_->push_end({.name = name,
                   .caller = caller,
                   .steady_ns = now,
                   .value = static_cast<double>(now - began) * 1e-6,
                   .kind = failed ? EventKind::Error : EventKind::End});
  if (start != impl_->open_spans.end()) impl_->open_spans.erase(start);
}

void StructuredLog::startup(double seconds) {
  const int64_t now = steady_now_ns();
  const auto lasted = static_cast<int64_t>(seconds * 1e9);
  std::lock_guard lock(impl_->mutex);
  impl_->push({.name = "startup", .steady_ns = now - lasted, .kind = EventKind::Start});
  impl_->push({.name = "startup", .steady_ns = now, .value = seconds * 1e3, .kind = EventKind::End});
}

void StructuredLog::flush() {
  std::unique_lock lock(impl_->mutex);
  const uint64_t mine = ++impl_->flushes_wanted;
  impl_->wake.notify_one();
  impl_->written.wait(lock, [&] { return impl_->flushes_done >= mine; });
}

StructuredSpan::StructuredSpan(StructuredLog* log, const char* name, const char* caller)
    : log_(log), name_(name), caller_(caller), exceptions_(std::uncaught_exceptions()) {
  if (log_) log_->start_span(name_, caller_);
}

StructuredSpan::~StructuredSpan() {
  if (log_) log_->end_span(name_, std::uncaught_exceptions() > exceptions_, caller_);
}

}  // namespace titan::train
