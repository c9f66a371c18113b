// JSON written by a signal's handler: to a descriptor, through memory that was there before, by write(2)
// alone.

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
#include <cstdint>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "dist/flight_record.h"
#include "titan/core/crash.h"
#include "titan/core/error.h"
#include "titan/core/file.h"

namespace titan::dist {

class SignalSafeJson {
 public:
  SignalSafeJson(int file, std::span<char> buffer) : file_(file), buffer_(buffer) {}

  /// Brackets, commas, keys: as they are.
  void raw(std::string_view text) noexcept;
  void number(int64_t value) noexcept;
  /// In quotes. Bytes that JSON doesn't take are written as escapes, those above 127 as a question mark.
  void text(std::string_view value) noexcept;
  /// `, "key": `
  void key(std::string_view name) noexcept;
  /// Whatever is left. Returns the errno of the first write that failed, or 0.
  int flush() noexcept;

 private:
  void put(char byte) noexcept;

  int file_;
  std::span<char> buffer_;
  size_t used_ = 0;
  int error_ = 0;
};

void SignalSafeJson::put(char byte) noexcept {
  if (used_ == buffer_.size()) flush();
  buffer_[used_++] = byte;
}

void SignalSafeJson::raw(std::string_view text) noexcept {
  for (const char byte : text) put(byte);
}

void SignalSafeJson::number(int64_t value) noexcept {
  char digits[20];
  size_t count = 0;
  auto left = value < 0 ? ~static_cast<uint64_t>(value) + 1 : static_cast<uint64_t>(value);
  do digits[count++] = static_cast<char>('0' + left % 10);
  while ((left /= 10) > 0);
  if (value < 0) put('-');
  while (count > 0) put(digits[--count]);
}

void SignalSafeJson::text(std::string_view value) noexcept {
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

void SignalSafeJson::key(std::string_view name) noexcept {
  raw(", ");
  text(name);
  raw(": ");
}

int SignalSafeJson::flush() noexcept {
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

// Everything that a handler needs is made when nothing is wrong yet: names, buffers, the folder. What is left
// are open, write, fsync, rename and the clock, which POSIX lets a handler call; the ring can be read while
// others write it.

namespace {

int64_t clock_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

/// Steady times of this process as times of day.
struct WallClock {
  int64_t steady = clock_ns(CLOCK_MONOTONIC), wall = clock_ns(CLOCK_REALTIME);
  int64_t of(int64_t steady_ns) const { return wall - (steady - steady_ns); }
};

// "[0, 1, 2]", in quotes: as PyTorch has it.
void write_ranks(SignalSafeJson& json, const GroupRecord& group) {
  json.raw("\"[");
  for (size_t i = 0; i < group.ranks.size(); ++i) {
    if (i > 0) json.raw(", ");
    json.number(group.ranks[i]);
  }
  json.raw("]\"");
}

void write_groups(SignalSafeJson& json, const FlightRecorder& recorder) {
  json.key("pg_config");
  json.raw("{");
  for (const GroupRecord* group = recorder.last_group(); group != nullptr; group = group->previous) {
    json.raw("\n\"");
    json.number(group->index);
    json.raw("\": {\"name\": \"");
    json.number(group->index);
    json.raw("\"");
    json.key("desc");
    json.text(group->name);
    json.key("purpose");
    json.text(group->purpose);
    json.key("ranks");
    write_ranks(json, *group);
    json.raw(group->previous != nullptr ? "}," : "}");
  }
  json.raw("}");
}

void write_sizes(SignalSafeJson& json, const CallSizes& sizes) {
  json.raw("[");
  if (sizes.num_dims >= 0) {
    json.raw("[");
    for (int64_t dim = 0; dim < std::min<int64_t>(sizes.num_dims, CallSizes::kMaxDims); ++dim) {
      if (dim > 0) json.raw(", ");
      json.number(sizes.dims[static_cast<size_t>(dim)]);
    }
    json.raw("]");
  }
  json.raw("]");
}

void write_dtypes(SignalSafeJson& json, const CallRecord& call) {
  json.raw("[");
  if (call.dtype != c10::ScalarType::Undefined) json.text(c10::toString(call.dtype));
  json.raw("]");
}

// As PyTorch names them: "nccl:send 0->1" with ranks of the group.
void write_name(SignalSafeJson& json, const CallRecord& call, int rank) {
  json.raw("\"titan:");
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

// What PyTorch calls started is when its watchdog looked; here, when somebody waits for the call.
const char* state_of(const CallRecord& call) {
  switch (call.state) {
    case CallState::Launched:
      return "scheduled";
    case CallState::Waiting:
    case CallState::Ordered:
      return "started";
    case CallState::Finished:
      return "completed";
    case CallState::Failed:
      break;
  }
  return "failed";
}

void write_identity(SignalSafeJson& json, const CallRecord& call, int rank) {
  const bool pair = is_point_to_point(call.op);
  const auto sequence = static_cast<int64_t>(call.sequence);
  json.raw("{\"record_id\": ");
  json.number(static_cast<int64_t>(call.number));
  json.key("pg_id");
  json.number(call.group != nullptr ? call.group->index : -1);
  json.key("process_group");
  json.raw("[\"");
  json.number(call.group != nullptr ? call.group->index : -1);
  json.raw("\", ");
  json.text(call.group != nullptr ? call.group->name : "");
  json.raw("]");
  json.key("collective_seq_id");
  json.number(pair ? 0 : sequence);
  json.key("p2p_seq_id");
  json.number(pair ? sequence : 0);
  json.key("op_id");
  json.number(static_cast<int64_t>(call.number));
  json.key("is_p2p");
  json.raw(pair ? "true" : "false");
  json.key("profiling_name");
  write_name(json, call, rank);
}

void write_call(SignalSafeJson& json, const CallRecord& call, int rank, const WallClock& clock) {
  write_identity(json, call, rank);
  json.key("phase");
  json.text(call.phase);
  json.key("module");
  json.text(call.module);
  json.key("input_sizes");
  write_sizes(json, call.in);
  json.key("input_dtypes");
  write_dtypes(json, call);
  json.key("output_sizes");
  write_sizes(json, call.out);
  json.key("output_dtypes");
  write_dtypes(json, call);
  json.key("bytes");
  json.number(call.bytes);
  json.key("time_created_ns");
  json.number(clock.of(call.start_ns));
  json.key("time_discovered_completed_ns");
  json.number(call.end_ns > 0 ? clock.of(call.end_ns) : 0);
  json.key("state");
  json.text(state_of(call));
  if (call.background) {
    json.key("background");
    json.raw("true");
  }
  json.key("retired");
  json.raw(call.end_ns > 0 ? "true}" : "false}");
}

bool is_open(const CallRecord& call) {
  return call.state != CallState::Finished && call.state != CallState::Failed;
}

void write_calls(SignalSafeJson& json, const FlightRecorder& recorder, int rank, const WallClock& clock,
                 FlightExtent extent) {
  json.key("entries");
  json.raw("[");
  const uint64_t next = recorder.num_calls(), kept = std::min<uint64_t>(next, recorder.num_entries());
  const uint64_t first_of_all = extent == FlightExtent::All ? next - kept : next - std::min(kept, kLastCalls);
  bool first = true;
  CallRecord call;
  for (uint64_t number = next - kept; number < next; ++number) {
    if (!recorder.read(number, call) || (number < first_of_all && !is_open(call))) continue;
    json.raw(first ? "\n" : ",\n");
    first = false;
    write_call(json, call, rank, clock);
  }
  json.raw("]");
}

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

}  // namespace

struct FlightDump::Writer {
  /// A temporary's name, and the buffer to write it through.
  struct Target {
    std::string temporary;
    mutable std::array<char, 32 * 1024> buffer;
  };

  std::shared_ptr<const FlightRecorder> recorder;
  Options options;
  std::filesystem::path path;
  std::string target_name, host;
  std::mutex mutex;
  std::atomic_flag in_handler = ATOMIC_FLAG_INIT;
  Target target, handler_target;

  Writer(std::shared_ptr<const FlightRecorder> calls, Options given);
  int write(const char* reason, FlightExtent extent);
  int write_in_handler(const char* reason);
  int write_to(const Target& to, const char* reason, FlightExtent extent) const;
  int write_temporary(const Target& to, const char* reason, FlightExtent extent) const;
  void write_header(SignalSafeJson& json, const char* reason, const WallClock& clock) const;
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

// A handler that has just read the pointer may go on with it in another thread for as long as it likes.
void keep_for_ever(std::shared_ptr<FlightDump::Writer> writer) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<FlightDump::Writer>>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(writer));
}

void watch_signals(const std::shared_ptr<FlightDump::Writer>& writer) {
  keep_for_ever(writer);
  signal_writer.store(writer.get());
  set_crash_hook(on_crash);
  survive_sigquit();
}

}  // namespace

FlightDump::Writer::Writer(std::shared_ptr<const FlightRecorder> calls, Options given)
    : recorder(std::move(calls)), options(std::move(given)), host(host_name()) {
  make_folder(options.folder);
  // A handler may find the process in another folder.
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

int FlightDump::write_in_handler(const char* reason) noexcept { return writer_->write_in_handler(reason); }

int write_flight_dump(const char* reason) noexcept {
  auto* writer = signal_writer.load();
  return writer ? writer->write(reason, FlightExtent::All) : ENOENT;
}

void survive_sigquit() {
  struct sigaction action = {};
  action.sa_handler = on_quit;
  action.sa_flags = SA_RESTART;
  sigaction(SIGQUIT, &action, nullptr);
}

int FlightDump::Writer::write(const char* reason, FlightExtent extent) {
  std::lock_guard lock(mutex);
  return write_to(target, reason, extent);
}

int FlightDump::Writer::write_in_handler(const char* reason) {
  if (in_handler.test_and_set()) return EBUSY;
  const int error = write_to(handler_target, reason, FlightExtent::All);
  in_handler.clear();
  return error;
}

int FlightDump::Writer::write_to(const Target& to, const char* reason, FlightExtent extent) const {
  if (const int error = write_temporary(to, reason, extent)) {
    unlink(to.temporary.c_str());
    return error;
  }
  return rename(to.temporary.c_str(), target_name.c_str()) == 0 ? 0 : errno;
}

int FlightDump::Writer::write_temporary(const Target& to, const char* reason, FlightExtent extent) const {
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

void FlightDump::Writer::write_header(SignalSafeJson& json, const char* reason,
                                      const WallClock& clock) const {
  const Activity activity = recorder->activity();
  json.raw("{\"version\": \"2.10\"");
  json.key("titan");
  json.raw("{\"rank\": ");
  json.number(options.rank);
  json.key("world_size");
  json.number(options.world_size);
  json.key("host");
  json.text(host);
  json.key("pid");
  json.number(getpid());
  json.key("reason");
  json.text(reason);
  json.key("time_ns");
  json.number(clock.wall);
  json.key("num_calls");
  json.number(static_cast<int64_t>(recorder->num_calls()));
  json.key("activity");
  json.text(activity.name);
  json.key("step");
  json.number(activity.step);
  json.key("activity_since_ns");
  json.number(activity.since_ns > 0 ? clock.of(activity.since_ns) : 0);
  json.raw("}");
}

}  // namespace titan::dist
