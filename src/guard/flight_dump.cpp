// Everything that a signal handler needs is made while nothing is wrong: names, buffers, the folder. That
// leaves open, write, fsync, rename and the clock, which POSIX lets a handler call; the ring can be read
// while others write it.

#include "guard/flight_dump.h"

#include <fcntl.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "core/file.h"
#include "core/process.h"
#include "dist/flight_record.h"
#include "titan/core/crash.h"
#include "titan/core/error.h"

namespace titan::dist {
namespace {

/// JSON from a signal handler: written to a descriptor through a buffer that exists already, with write(2)
/// alone.
class SignalSafeJson {
 public:
  SignalSafeJson(int file, std::span<char> buffer) : file_(file), buffer_(buffer) {}

  /// Writes brackets, commas and keys unchanged.
  void raw(std::string_view text) noexcept {
    for (const char byte : text) put(byte);
  }
  void number(int64_t value) noexcept {
    char digits[20];
    size_t count = 0;
    auto left = value < 0 ? ~static_cast<uint64_t>(value) + 1 : static_cast<uint64_t>(value);
    do digits[count++] = static_cast<char>('0' + left % 10);
    while ((left /= 10) > 0);
    if (value < 0) put('-');
    while (count > 0) put(digits[--count]);
  }
  /// Writes a quoted string. Bytes that JSON doesn't accept are escaped; non-ASCII ones become '?'.
  void text(std::string_view value) noexcept {
    put('"');
    for (const char byte : value) {
      const auto code = static_cast<unsigned char>(byte);
      if (byte == '"' || byte == '\\') {
        put('\\');
        put(byte);
      } else if (code < 0x20) {
        raw("\\u00");
        put("0123456789abcdef"[code >> 4]);
        put("0123456789abcdef"[code & 15]);
      } else {
        put(code < 0x7f ? byte : '?');
      }
    }
    put('"');
  }
  /// `, "name": `
  void key(std::string_view name) noexcept {
    raw(", ");
    text(name);
    raw(": ");
  }
  void number_field(std::string_view name, int64_t value) noexcept {
    key(name);
    number(value);
  }
  void text_field(std::string_view name, std::string_view value) noexcept {
    key(name);
    text(value);
  }
  void raw_field(std::string_view name, std::string_view value) noexcept {
    key(name);
    raw(value);
  }
  /// Writes the rest. Returns the errno of the first write that failed, or 0.
  int flush() noexcept {
    size_t done = 0;
    while (done < used_ && error_ == 0) {
      const ssize_t written = ::write(file_, buffer_.data() + done, used_ - done);
      if (written > 0)
        done += static_cast<size_t>(written);
      else if (written == 0 || errno != EINTR)
        error_ = written == 0 ? EIO : errno;
    }
    used_ = 0;
    return error_;
  }

 private:
  void put(char byte) noexcept {
    if (used_ == buffer_.size()) flush();
    buffer_[used_++] = byte;
  }

  int file_;
  std::span<char> buffer_;
  size_t used_ = 0;
  int error_ = 0;
};

int64_t clock_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

/// Converts steady times of this process to times of day.
struct WallClock {
  int64_t steady = clock_ns(CLOCK_MONOTONIC), wall = clock_ns(CLOCK_REALTIME);
  int64_t of(int64_t steady_ns) const { return steady_ns > 0 ? wall - (steady - steady_ns) : 0; }
};

template <class Int>
void write_list(SignalSafeJson& json, std::span<const Int> numbers) {
  json.raw("[");
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (i > 0) json.raw(", ");
    json.number(numbers[i]);
  }
  json.raw("]");
}

void write_groups(SignalSafeJson& json, const FlightRecorder& recorder) {
  json.raw_field("pg_config", "{");
  for (const GroupRecord* group = recorder.last_group(); group != nullptr; group = group->previous) {
    json.raw("\n\"");
    json.number(group->index);
    json.raw("\": {\"name\": \"");
    json.number(group->index);
    json.raw("\"");
    json.text_field("desc", group->name);
    json.text_field("purpose", group->purpose);
    json.raw_field("ranks", "\"");  // "[0, 1, 2]", in quotes: PyTorch's form
    write_list<int>(json, group->ranks);
    json.raw(group->previous != nullptr ? "\"}," : "\"}");
  }
  json.raw("}");
}

void write_tensor(SignalSafeJson& json, const CallRecord& call, const CallSizes& sizes, bool is_input) {
  json.raw_field(is_input ? "input_sizes" : "output_sizes", "[");
  const auto num_dims = std::min<int64_t>(sizes.num_dims, CallSizes::kMaxDims);
  for (int i = 0; i < call.num_tensors && num_dims >= 0; ++i) {
    if (i > 0) json.raw(", ");
    write_list<int64_t>(json, {sizes.dims.data(), static_cast<size_t>(num_dims)});
  }
  json.raw("]");
  json.raw_field(is_input ? "input_dtypes" : "output_dtypes", "[");
  for (int i = 0; i < call.num_tensors && call.dtype != c10::ScalarType::Undefined; ++i) {
    if (i > 0) json.raw(", ");
    json.text(c10::toString(call.dtype));
  }
  json.raw("]");
}

// PyTorch's form: "nccl:send 0->1", with ranks of the group.
void write_name(SignalSafeJson& json, const CallRecord& call, int rank) {
  json.raw_field("profiling_name", "\"titan:");
  json.raw(name_of(call.op));
  if (is_point_to_point(call.op) && call.group != nullptr) {
    const auto& ranks = call.group->ranks;
    json.raw(" ");
    json.number(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
    json.raw(call.op == CollectiveOp::Send ? "->" : "<-");
    json.number(call.peer);
  }
  json.raw("\"");
}

// In PyTorch, "started" means that its watchdog saw the call start; here, that a thread waits for it.
const char* name_in_files(CallState state) {
  static constexpr std::array names = {"scheduled", "started", "started", "completed", "failed"};
  return names[static_cast<size_t>(state)];
}

void write_call(SignalSafeJson& json, const CallRecord& call, int rank, const WallClock& clock) {
  const auto number = static_cast<int64_t>(call.number), sequence = static_cast<int64_t>(call.sequence);
  const bool is_pair = is_point_to_point(call.op);
  const int group = call.group != nullptr ? call.group->index : -1;
  json.raw("{\"record_id\": ");
  json.number(number);
  json.number_field("pg_id", group);
  json.raw_field("process_group", "[\"");
  json.number(group);
  json.raw("\", ");
  json.text(call.group != nullptr ? call.group->name : "");
  json.raw("]");
  json.number_field("collective_seq_id", is_pair ? 0 : sequence);
  json.number_field("p2p_seq_id", is_pair ? sequence : 0);
  json.number_field("op_id", number);
  json.raw_field("is_p2p", is_pair ? "true" : "false");
  write_name(json, call, rank);
  json.text_field("phase", call.phase);
  json.text_field("module", call.module);
  write_tensor(json, call, call.in, /*is_input=*/true);
  write_tensor(json, call, call.out, /*is_input=*/false);
  json.number_field("bytes", call.bytes);
  json.number_field("time_created_ns", clock.of(call.start_ns));
  json.number_field("time_discovered_completed_ns", clock.of(call.end_ns));
  if (call.device_ns > 0) json.number_field("device_ns", call.device_ns);
  json.text_field("state", name_in_files(call.state));
  if (call.background) json.raw_field("background", "true");
  json.raw_field("retired", call.end_ns > 0 ? "true}" : "false}");
}

// With FlightExtent::Last: the last calls, and older ones that haven't ended.
void write_calls(SignalSafeJson& json, const FlightRecorder& recorder, int rank, const WallClock& clock,
                 FlightExtent extent) {
  json.raw_field("entries", "[");
  const uint64_t next = recorder.num_calls(), kept = std::min<uint64_t>(next, recorder.num_entries());
  const uint64_t last = extent == FlightExtent::All ? kept : std::min(kept, kLastCalls);
  bool first = true;
  CallRecord call;
  for (uint64_t number = next - kept; number < next; ++number) {
    if (!recorder.read(number, call) || (number < next - last && has_ended(call.state))) continue;
    json.raw(first ? "\n" : ",\n");
    first = false;
    write_call(json, call, rank, clock);
  }
  json.raw("]");
}

}  // namespace

struct FlightDump::Writer {
  /// The name of a temporary file, and the buffer to write it through.
  struct Target {
    std::string temporary;
    mutable std::array<char, 32 * 1024> buffer;
  };

  Writer(std::shared_ptr<const FlightRecorder> calls, Options given)
      : recorder(std::move(calls)), options(std::move(given)), host(host_name()) {
    make_folder(options.folder);
    // The process may have changed its working directory by the time a handler runs.
    options.folder = std::filesystem::absolute(options.folder);
    path = options.folder / str(options.prefix, options.rank, ".json");
    target_name = path.string();
    const auto temporary = [&](const char* kind) {
      return (options.folder / str(".", options.prefix, options.rank, ".json.", kind)).string();
    };
    target.temporary = temporary("tmp");
    handler_target.temporary = temporary("signal.tmp");
    std::filesystem::remove(path);
  }

  int write(const char* reason, FlightExtent extent) {
    std::lock_guard lock(mutex);
    return write_to(target, reason, extent);
  }
  /// Uses only async-signal-safe functions. Does nothing while another handler writes.
  int write_in_handler(const char* reason) {
    if (in_handler.test_and_set()) return EBUSY;
    const int error = write_to(handler_target, reason, FlightExtent::All);
    in_handler.clear();
    return error;
  }

  std::shared_ptr<const FlightRecorder> recorder;
  Options options;
  std::filesystem::path path;
  std::string target_name, host;
  std::mutex mutex;
  std::atomic_flag in_handler = ATOMIC_FLAG_INIT;
  Target target, handler_target;

 private:
  int write_to(const Target& to, const char* reason, FlightExtent extent) const {
    if (const int error = write_temporary(to, reason, extent)) {
      unlink(to.temporary.c_str());
      return error;
    }
    return rename(to.temporary.c_str(), target_name.c_str()) == 0 ? 0 : errno;
  }

  int write_temporary(const Target& to, const char* reason, FlightExtent extent) const {
    const int file = open(to.temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0) return errno;
    const WallClock clock;
    SignalSafeJson json(file, to.buffer);
    write_header(json, reason, clock);
    write_groups(json, *recorder);
    write_calls(json, *recorder, options.rank, clock, extent);
    json.raw("}\n");
    int error = json.flush();
    if (error == 0 && fsync(file) != 0 && errno != EINVAL) error = errno;
    close(file);
    return error;
  }

  void write_header(SignalSafeJson& json, const char* reason, const WallClock& clock) const {
    const Activity activity = recorder->activity();
    json.raw("{\"version\": \"2.10\"");
    json.raw_field("titan", "{\"rank\": ");
    json.number(options.rank);
    json.number_field("world_size", options.world_size);
    json.text_field("host", host);
    json.number_field("pid", getpid());
    json.text_field("reason", reason);
    json.number_field("time_ns", clock.wall);
    json.number_field("num_calls", static_cast<int64_t>(recorder->num_calls()));
    json.text_field("activity", activity.name);
    json.number_field("step", activity.step);
    json.number_field("activity_since_ns", clock.of(activity.since_ns));
    json.raw("}");
  }
};

namespace {

std::atomic<FlightDump::Writer*> signal_writer{nullptr};

void on_quit(int /*signal*/) {
  const int error = errno;
  if (auto* writer = signal_writer.load()) writer->write_in_handler("SIGQUIT");
  errno = error;
}

void on_crash(const char* signal_name) {
  if (auto* writer = signal_writer.load()) writer->write_in_handler(signal_name);
}

// A handler that has just read the pointer may keep using it in another thread for as long as it likes.
void keep_forever(std::shared_ptr<FlightDump::Writer> writer) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<FlightDump::Writer>>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(writer));
}

void watch_signals(const std::shared_ptr<FlightDump::Writer>& writer) {
  keep_forever(writer);
  signal_writer.store(writer.get());
  set_crash_hook(on_crash);
  survive_sigquit();
}

}  // namespace

FlightDump::FlightDump(std::shared_ptr<const FlightRecorder> recorder, Options options)
    : writer_(std::make_shared<Writer>(std::move(recorder), std::move(options))) {
  if (writer_->options.on_signals) watch_signals(writer_);
}

FlightDump::~FlightDump() {
  Writer* mine = writer_.get();
  if (signal_writer.compare_exchange_strong(mine, nullptr)) set_crash_hook(nullptr);
}

const std::filesystem::path& FlightDump::path() const { return writer_->path; }
const std::filesystem::path& FlightDump::folder() const { return writer_->options.folder; }

int FlightDump::write(const char* reason, FlightExtent extent) noexcept {
  return writer_->write(reason, extent);
}

void survive_sigquit() {
  struct sigaction action = {};
  action.sa_handler = on_quit;
  action.sa_flags = SA_RESTART;
  sigaction(SIGQUIT, &action, nullptr);
}

}  // namespace titan::dist
