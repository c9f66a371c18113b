#include "observe/structured_log.h"

#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <system_error>
#include <thread>

#include <ATen/Parallel.h>
#include <torch/version.h>

#include "core/json.h"
#include "core/process.h"
#include "core/threads.h"
#include "dist/device_backend.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/world.h"
#include "titan/train/run_observer.h"

namespace titan::train {

int64_t steady_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// ---- the lines

namespace {

enum class EventKind : uint8_t { Start, End, Error, Instant };

struct StructuredEvent {
  const char* name = "";
  const char* caller = "";
  int64_t steady_ns = 0;
  int64_t step = 0;
  int64_t relative_step = 0;  ///< this process's step, from 1; 0 before the first
  double value = std::numeric_limits<double>::quiet_NaN();  ///< NaN: none; for an end: milliseconds
  pid_t thread = 0;
  uint8_t step_tags = 0;  ///< kSavesTag | kValidatesTag
  EventKind kind = EventKind::Instant;
};

constexpr uint8_t kSavesTag = 1;
constexpr uint8_t kValidatesTag = 2;

/// Appends `key` and the number; `format` may limit its digits.
template <class Number, class... Format>
void append_number(std::string& text, const char* key, Number value, Format... format) {
  std::array<char, 48> digits{};
  text += key;
  text.append(digits.data(),
              std::to_chars(digits.data(), digits.data() + digits.size(), value, format...).ptr);
}

// With microseconds, as traces show them.
void append_milliseconds(std::string& text, const char* key, double value) {
  append_number(text, key, value, std::chars_format::fixed, 3);
}

/// `format` is for the date down to the second; the microseconds follow in six digits.
std::string utc_text(int64_t wall_us, const char* format) {
  const std::time_t seconds = wall_us / 1'000'000;
  std::tm parts = {};
  ::gmtime_r(&seconds, &parts);
  std::array<char, 48> text{};
  const size_t length = std::strftime(text.data(), text.size(), format, &parts);
  std::snprintf(text.data() + length, text.size() - length, "%06d", static_cast<int>(wall_us % 1'000'000));
  return text.data();
}

std::string_view suffix_of(EventKind kind) {
  static constexpr std::array<std::string_view, 4> suffixes = {"_start", "_end", "_error", ""};
  return suffixes[static_cast<size_t>(kind)];
}

void append_tags(std::string& text, uint8_t tags) {
  text += ", \"step_tags\": [";
  if (tags & kSavesTag) text += "\"checkpoint_save\"";
  if (tags & kValidatesTag) text += tags & kSavesTag ? ", \"eval\"" : "\"eval\"";
  text += ']';
}

/// Writes events as JSON lines that name this process, its rank and its host.
class EventLines {
 public:
  EventLines(int rank, int local_rank) : process_start_ns_(steady_now_ns()), previous_ns_(process_start_ns_) {
    identity_ = str(", \"rank\": ", rank, ", \"local_rank\": ", local_rank,
                    ", \"host_name\": ", json_quoted(host_name()), ", \"pid\": ", ::getpid(),
                    ", \"task_name\": \"train\"");
    set_clock();
  }

  /// Measures the offset of the wall clock from the steady clock again: clocks drift, and people set them.
  void set_clock() {
    const auto wall = std::chrono::system_clock::now().time_since_epoch();
    offset_ns_ = std::chrono::duration_cast<std::chrono::nanoseconds>(wall).count() - steady_now_ns();
  }

  /// The first line of each file. `environment`: a JSON object.
  std::string process_line(const std::string& environment) {
    std::string text;
    append_head(text, process_start_ns_, "instant");
    return text + R"(, "log_type_name": "process", "value": null, "step": 0, "relative_step": 0)" +
           identity_ + ", \"environment\": " + environment + "}\n";
  }

  void append(std::string& text, const StructuredEvent& event) {
    append_head(text, event.steady_ns, event.kind == EventKind::Instant ? "instant" : "event");
    text.append(", \"log_type_name\": \"").append(event.name).append(suffix_of(event.kind)).append("\"");
    if (!std::isfinite(event.value))
      text += ", \"value\": null";
    else if (event.kind == EventKind::Instant)
      append_number(text, ", \"value\": ", event.value);
    else
      append_milliseconds(text, ", \"value\": ", event.value);
    append_milliseconds(
        text, ", \"delta_ms\": ", std::max(0.0, static_cast<double>(event.steady_ns - previous_ns_) * 1e-6));
    previous_ns_ = event.steady_ns;
    append_number(text, ", \"step\": ", event.step);
    append_number(text, ", \"relative_step\": ", event.relative_step);
    append_tags(text, event.step_tags);
    text += identity_;
    append_number(text, ", \"tid\": ", static_cast<int64_t>(event.thread));
    text.append(", \"caller\": \"").append(event.caller).append("\"}\n");
  }

 private:
  void append_head(std::string& text, int64_t steady_ns, const char* type) {
    const int64_t wall_us = (steady_ns + offset_ns_) / 1000;
    append_number(text, "{\"seq_id\": ", sequence_++);
    text.append(", \"time\": \"").append(utc_text(wall_us, "%Y-%m-%dT%H:%M:%S.")).append("Z\"");
    append_number(text, ", \"time_ms\": ", wall_us / 1000);
    append_number(text, ", \"time_us\": ", wall_us);
    text.append(", \"log_type\": \"").append(type).append("\"");
  }

  int64_t process_start_ns_;
  int64_t offset_ns_ = 0;
  int64_t previous_ns_;
  int64_t sequence_ = 0;
  std::string identity_;  // `, "rank": 0, ...`
};

// ---- the first line

// "model name : AMD EPYC 7B13". Only x86 has this line.
std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

std::string command_line() {
  std::ifstream file("/proc/self/cmdline");
  std::string words((std::istreambuf_iterator<char>(file)), {});
  if (!words.empty() && words.back() == '\0') words.pop_back();
  std::replace(words.begin(), words.end(), '\0', ' ');
  return words;
}

std::string device_text(at::Device device) {
  auto* backend = dist::device_backend();
  if (!backend || device.type() != backend->device_type()) return device.str();
  return device.str() + " " + backend->device_name(device.index());
}

std::string kernel_text() {
  utsname name = {};
  ::uname(&name);
  return std::string(name.sysname) + " " + name.release + " " + name.machine;
}

}  // namespace

std::string process_environment_json(const dist::World& world, at::Device device) {
  const nlohmann::ordered_json object = {{"titan", kVersion},
                                         {"libtorch", TORCH_VERSION},
                                         {"compiler", __VERSION__},
                                         {"host", host_name()},
                                         {"kernel", kernel_text()},
                                         {"cpu", cpu_name()},
                                         {"cores", std::thread::hardware_concurrency()},
                                         {"machine_memory_gib", machine_memory_gib()},
                                         {"device", device_text(device)},
                                         {"world_size", world.size()},
                                         {"local_size", world.local_size()},
                                         {"backend", world.backend()},
                                         {"launched_by", world.launched_by()},
                                         {"threads", at::get_num_threads()},
                                         {"command", command_line()}};
  return json_text(object);  // a command line may hold bytes that aren't UTF-8
}

// ---- the file

void StructuredFile::open(const std::string& head) {
  const auto current = path(".jsonl");
  if (file_) {
    file_.reset();
    std::error_code error;
    std::filesystem::rename(current, path(".earlier.jsonl"), error);
    TITAN_CHECK(!error, "cannot rename ", current.string(), ": ", error.message());
  }
  file_ = std::make_unique<AppendFile>(current, /*truncate=*/true);
  written_ = 0;
  append(head);
}

void StructuredFile::reopen(const std::string& head) {
  const auto current = path(".jsonl");
  file_ = std::make_unique<AppendFile>(current, /*truncate=*/false);
  std::error_code error;
  const auto size = std::filesystem::file_size(current, error);
  written_ = error ? 0 : static_cast<int64_t>(size);
  append(written_ > 0 ? "\n" + head : head);
}

void StructuredFile::append(const std::string& lines) {
  file_->append(lines);
  written_ += static_cast<int64_t>(lines.size());
}

std::string structured_stem(int rank) {
  using std::chrono::duration_cast, std::chrono::microseconds;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const int64_t now_us = duration_cast<microseconds>(now).count();
  constexpr char kAlphabet[] = "abcdefghijklmnopqrstuvwxyz0123456789";
  std::random_device random;
  std::string unique;
  for (int i = 0; i < 6; ++i) unique += kAlphabet[random() % (sizeof kAlphabet - 1)];
  return str("train.global_rank_", rank, ".", utc_text(now_us, "%Y%m%d-%H%M%S-"), "-", unique);
}

namespace {

/// Keeps the logs of the newest `kept` processes of a rank, so that a job that fails repeatedly doesn't fill
/// its folder. Files that can't be removed stay.
void remove_old_logs(const std::filesystem::path& folder, int rank, size_t kept) {
  const std::string prefix = str("train.global_rank_", rank, ".");
  std::map<std::string, std::vector<std::filesystem::path>> processes;  // by stem, which sorts by time
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    if (name.starts_with(prefix) && name.ends_with(".jsonl"))
      processes[name.substr(0, name.find('.', prefix.size()))].push_back(entry.path());
  }
  while (processes.size() > kept) {
    for (const auto& file : processes.begin()->second) std::filesystem::remove(file, error);
    processes.erase(processes.begin());
  }
}

// ---- the log

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
              "MiB kept of one process's events; beyond that the older half is dropped", config::at_least(1));
  table.field(
      "keep_latest_k", &StructuredLogSettings::keep_latest_k,
      "number of processes of each rank whose logs are kept, the newest ones (a restart is a new process)",
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

  // The functions up to end_post_data() are called under the lock.

  // Remembers the last thread: the system call costs more than the rest of an event, and nearly all events
  // come from the training thread.
  pid_t calling_thread() {
    if (const auto id = std::this_thread::get_id(); id != last_thread_id) {
      last_thread_id = id;
      last_thread = static_cast<pid_t>(::syscall(SYS_gettid));
    }
    return last_thread;
  }

  void push(StructuredEvent event) {
    event.thread = calling_thread();
    if (event.step == 0) event.step = step;
    event.relative_step = relative_step + event.step - step;
    event.step_tags = tags;
    if (queue.size() >= kMostQueued) {
      ++dropped;
      return;
    }
    queue.push_back(event);
    if (queue.size() == kWriteEvents) wake.notify_one();
  }

  void push_start(const char* name, const char* caller, int64_t now) {
    push({.name = name, .caller = caller, .steady_ns = now, .kind = EventKind::Start});
  }

  // A failed span has an _error before its _end.
  void push_end(const char* name, const char* caller, int64_t began, int64_t now, bool failed = false) {
    StructuredEvent event{.name = name,
                          .caller = caller,
                          .steady_ns = now,
                          .value = static_cast<double>(now - began) * 1e-6,
                          .kind = EventKind::Error};
    if (failed) push(event);
    event.kind = EventKind::End;
    push(event);
  }

  // The span between a step's batches and its forward: the ranks sum their token counts there, so all of them
  // wait for the rank whose data arrives last.
  void end_post_data(int64_t now) {
    if (const int64_t began = std::exchange(post_data_ns, 0); began > 0)
      push_end(kPostData, kTrainer, began, now);
  }

  // The functions below are called by the writer thread.

  bool is_due() const { return ending || flushes_done < flushes_wanted || queue.size() >= kWriteEvents; }
  void write_until_ended() {
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

  // The run doesn't depend on its log: a full disk costs only the events of that time.
  void write(const std::vector<StructuredEvent>& events, int64_t lost) {
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

  void open() {
    lines.set_clock();
    if (failed) return file.reopen(lines.process_line(options.environment));
    if (file.is_open()) return;
    file.open(lines.process_line(options.environment));
    remove_old_logs(options.folder, options.rank, options.kept_processes);
  }

  void append(const std::vector<StructuredEvent>& events) {
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
  impl_->push_start(span_name(phase), kTrainer, now);
}

void StructuredLog::end(Phase phase, int64_t /*step*/, bool failed) {
  const int64_t now = steady_now_ns();
  std::lock_guard lock(impl_->mutex);
  impl_->end_post_data(now);
  impl_->push_end(span_name(phase), kTrainer, impl_->open_phases[static_cast<size_t>(phase)], now, failed);
  if (phase != Phase::Data || failed) return;
  impl_->post_data_ns = now;
  impl_->push_start(kPostData, kTrainer, now);
}

void StructuredLog::logged(const StepMetrics& metrics) {
  const char* caller = "titan::train::MetricsLogger";
  instant("loss", metrics.loss, caller, metrics.step);
  instant("grad_norm", metrics.grad_norm, caller, metrics.step);
  instant("tps", metrics.tps, caller, metrics.step);
  instant("step_s", metrics.step_s, caller, metrics.step);
  instant("data_loading_s", metrics.data_loading_s, caller, metrics.step);
  instant("memory_gib", metrics.memory_gib, caller, metrics.step);
  instant("memory_percent", metrics.memory_percent, caller, metrics.step);
  instant("local_valid_tokens", static_cast<double>(metrics.local_valid_tokens), caller, metrics.step);
  instant("global_valid_tokens", static_cast<double>(metrics.global_valid_tokens), caller, metrics.step);
}

void StructuredLog::stopped(int signal) { instant("stopped", signal, kTrainer); }

void StructuredLog::instant(const char* name, std::optional<double> value, const char* caller, int64_t step) {
  const int64_t now = steady_now_ns();
  std::lock_guard lock(impl_->mutex);
  StructuredEvent event{.name = name, .caller = caller, .steady_ns = now, .step = step};
  if (value) event.value = *value;
  impl_->push(event);
}

void StructuredLog::start_span(const char* name, const char* caller) {
  const int64_t now = steady_now_ns();
  std::lock_guard lock(impl_->mutex);
  impl_->push_start(name, caller, now);
  impl_->open_spans[{impl_->calling_thread(), name}] = now;
}

void StructuredLog::end_span(const char* name, bool failed, const char* caller) {
  const int64_t now = steady_now_ns();
  std::lock_guard lock(impl_->mutex);
  const auto start = impl_->open_spans.find({impl_->calling_thread(), name});
  const int64_t began = start == impl_->open_spans.end() ? now : start->second;
  impl_->push_end(name, caller, began, now, failed);
  if (start != impl_->open_spans.end()) impl_->open_spans.erase(start);
}

void StructuredLog::startup(double seconds) {
  const int64_t now = steady_now_ns();
  const int64_t began = now - static_cast<int64_t>(seconds * 1e9);
  std::lock_guard lock(impl_->mutex);
  impl_->push_start("startup", "", began);
  impl_->push_end("startup", "", began, now);
}

void StructuredLog::flush() {
  std::unique_lock lock(impl_->mutex);
  const uint64_t mine = ++impl_->flushes_wanted;
  impl_->wake.notify_one();
  impl_->written.wait(lock, [&] { return impl_->flushes_done >= mine; });
}

}  // namespace titan::train
