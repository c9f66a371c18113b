// [Note: ring of calls]
// A slot is a sequence lock over words: `version` is odd while the slot is written, and says which call it
// holds. A writer claims the slot first. So if a writer stalls for a whole turn of the ring, the next one
// doesn't write at the same time: the later call is left out. State and end are separate words that contain
// the call's number, so that the end of a call that has left the ring isn't taken for the end of the call
// that replaced it.

#include "dist/flight_record.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "titan/core/error.h"

namespace titan::dist {
namespace {

constexpr size_t kCallWords = sizeof(CallRecord) / sizeof(uint64_t);
static_assert(kCallWords * sizeof(uint64_t) == sizeof(CallRecord));
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free);

// If no thread sweeps, finish_when() does so each time this many calls have gathered.
constexpr size_t kSweepEach = 1024;

constexpr uint64_t kTimeMask = (uint64_t{1} << 48) - 1;  // nanoseconds: three days

thread_local bool is_background = false;

int64_t now_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

uint64_t mark_of(uint64_t number, CallState state) { return number << 8 | static_cast<uint64_t>(state); }
CallState state_in(uint64_t mark) { return static_cast<CallState>(mark & 0xff); }
uint64_t time_mark(uint64_t number, int64_t ns) {
  return number << 48 | (static_cast<uint64_t>(ns) & kTimeMask);
}
bool is_time_of(const CallRecord& call, uint64_t mark) { return mark >> 48 == (call.number & 0xffff); }
int64_t end_in(uint64_t mark, const CallRecord& call) {
  if (!is_time_of(call, mark)) return 0;
  return call.start_ns + static_cast<int64_t>((mark - static_cast<uint64_t>(call.start_ns)) & kTimeMask);
}

template <size_t N>
void copy_end(char (&to)[N], std::string_view text) {
  if (text.size() >= N) text.remove_prefix(text.size() - (N - 1));
  std::memcpy(to, text.data(), text.size());
  to[text.size()] = '\0';
}

}  // namespace

struct FlightRecorder::Slot {
  std::atomic<uint64_t> version{0};  // 2 n + 1 while call n is written, 2 n + 2 with call n in it
  std::atomic<uint64_t> mark{~uint64_t{0}};
  // Times in the low 48 bits; above them 16 bits of the call's number.
  std::atomic<uint64_t> end{0}, on_device{0};
  std::array<std::atomic<uint64_t>, kCallWords> words{};
};

const char* name_of(CollectiveOp op) {
  static constexpr std::array names = {"all_gather", "reduce_scatter", "all_reduce", "broadcast",
                                       "all_to_all", "send",           "receive",    "barrier"};
  return names[static_cast<size_t>(op)];
}

const char* name_of(CallState state) {
  static constexpr std::array names = {"launched", "waiting", "ordered", "finished", "failed"};
  return names[static_cast<size_t>(state)];
}

void CallSizes::set(c10::IntArrayRef sizes) {
  const size_t joined = sizes.size() > kMaxDims ? sizes.size() - kMaxDims : 0;
  int64_t first = 1;
  for (size_t i = 0; i < joined; ++i) first *= sizes[i];
  num_dims = static_cast<int64_t>(sizes.size() - joined);
  for (size_t i = joined; i < sizes.size(); ++i) dims[i - joined] = sizes[i];
  if (joined > 0) dims[0] *= first;
}

void CallRecord::set_label(std::string_view phase_text, std::string_view module_text) {
  copy_end(phase, phase_text);
  copy_end(module, module_text);
}

std::string CallRecord::describe() const {
  std::string text = str(name_of(op), " #", sequence);
  if (is_point_to_point(op)) text += str(op == CollectiveOp::Send ? " to" : " from", " its rank ", peer);
  if (group) text += str(" of group '", group->name, "'");
  if (!*phase) return text;
  return text + str(" (", phase, *module ? " " : "", module, ")");
}

std::string CallRecord::failure() const {
  return str(name_of(op), " #", sequence, group ? str(" in group '", group->name, '\'') : "", " failed");
}

BackgroundCalls::BackgroundCalls() : before_(std::exchange(is_background, true)) {}
BackgroundCalls::~BackgroundCalls() { is_background = before_; }
bool BackgroundCalls::active() noexcept { return is_background; }

FlightRecorder::FlightRecorder(size_t num_entries, size_t least_slots)
    : num_entries_(num_entries),
      num_slots_(std::max(num_entries, least_slots)),
      ring_(new Slot[num_slots_]) {}

FlightRecorder::~FlightRecorder() = default;

FlightRecorder::Slot& FlightRecorder::slot_of(uint64_t number) const noexcept {
  return ring_[number % num_slots_];
}

bool FlightRecorder::claim(Slot& slot, uint64_t number) noexcept {
  uint64_t version = slot.version.load(std::memory_order_relaxed);
  const bool is_free = version % 2 == 0 && version < 2 * number + 1;
  return is_free && slot.version.compare_exchange_strong(version, 2 * number + 1, std::memory_order_acquire);
}

uint64_t FlightRecorder::start(CallRecord call) noexcept {
  call.number = next_.fetch_add(1, std::memory_order_acq_rel);
  call.start_ns = now_ns();
  call.background = is_background;
  Slot& slot = slot_of(call.number);
  if (!claim(slot, call.number)) return call.number;
  std::array<uint64_t, kCallWords> words;
  std::memcpy(words.data(), &call, sizeof(call));
  std::atomic_thread_fence(std::memory_order_release);
  for (size_t i = 0; i < kCallWords; ++i) slot.words[i].store(words[i], std::memory_order_relaxed);
  slot.mark.store(mark_of(call.number, CallState::Launched), std::memory_order_relaxed);
  slot.version.store(2 * call.number + 2, std::memory_order_release);
  return call.number;
}

void FlightRecorder::wait(uint64_t number) noexcept {
  uint64_t launched = mark_of(number, CallState::Launched);
  slot_of(number).mark.compare_exchange_strong(launched, mark_of(number, CallState::Waiting),
                                               std::memory_order_release);
}

void FlightRecorder::finish(uint64_t number, CallState state, int64_t device_ns) noexcept {
  Slot& slot = slot_of(number);
  uint64_t mark = slot.mark.load(std::memory_order_acquire);
  if (mark >> 8 != number) return;  // the ring has turned since
  if (has_ended(state)) {
    slot.end.store(time_mark(number, now_ns()), std::memory_order_relaxed);
    slot.on_device.store(time_mark(number, device_ns), std::memory_order_relaxed);
  }
  slot.mark.compare_exchange_strong(mark, mark_of(number, state), std::memory_order_release);
}

void FlightRecorder::finish_when(uint64_t number, std::function<DeviceCall()> ask) {
  finish(number, CallState::Ordered);
  size_t num_waiting = 0;
  {
    std::lock_guard lock(on_device_mutex_);
    on_device_.push_back({number, std::move(ask)});
    num_waiting = on_device_.size();
  }
  if (num_waiting % kSweepEach == 0) sweep();
}

// A device that has failed throws. The training thread meets the same error, and knows more about its cause.
bool FlightRecorder::settle(const OnDevice& call) noexcept {
  try {
    const DeviceCall found = call.ask();
    if (!found.done) return false;
    finish(call.number, CallState::Finished, found.ns);
  } catch (...) {
    finish(call.number, CallState::Failed);
  }
  return true;
}

void FlightRecorder::sweep() noexcept {
  std::vector<OnDevice> calls;
  {
    std::lock_guard lock(on_device_mutex_);
    calls.swap(on_device_);
  }
  // Without the lock: a driver in trouble may be slow to answer, and recording continues meanwhile.
  std::erase_if(calls, [this](const OnDevice& call) { return settle(call); });
  std::lock_guard lock(on_device_mutex_);
  on_device_.insert(on_device_.begin(), std::make_move_iterator(calls.begin()),
                    std::make_move_iterator(calls.end()));
}

bool FlightRecorder::read(uint64_t number, CallRecord& call) const noexcept {
  const Slot& slot = slot_of(number);
  const uint64_t version = 2 * number + 2;
  if (slot.version.load(std::memory_order_acquire) != version) return false;
  std::array<uint64_t, kCallWords> words;
  for (size_t i = 0; i < kCallWords; ++i) words[i] = slot.words[i].load(std::memory_order_relaxed);
  const uint64_t mark = slot.mark.load(std::memory_order_acquire);
  const uint64_t end = slot.end.load(std::memory_order_relaxed);
  const uint64_t on_device = slot.on_device.load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (slot.version.load(std::memory_order_relaxed) != version) return false;
  std::memcpy(static_cast<void*>(&call), words.data(), sizeof(call));
  call.state = state_in(mark);
  call.end_ns = has_ended(call.state) ? end_in(end, call) : 0;
  const bool is_timed = has_ended(call.state) && is_time_of(call, on_device);
  call.device_ns = is_timed ? static_cast<int64_t>(on_device & kTimeMask) : 0;
  return true;
}

std::optional<CallRecord> FlightRecorder::open_call(bool with_background) const {
  std::optional<CallRecord> on_device;
  const uint64_t next = num_calls();
  CallRecord call;
  for (uint64_t number = next - std::min<uint64_t>(next, num_slots_); number < next; ++number) {
    if (!read(number, call) || (call.background && !with_background)) continue;
    if (call.state == CallState::Waiting) return call;
    if (call.state == CallState::Ordered && !on_device) on_device = call;
  }
  return on_device;
}

std::vector<CallRecord> FlightRecorder::snapshot() const {
  std::vector<CallRecord> calls;
  const uint64_t next = num_calls(), kept = std::min<uint64_t>(next, num_entries_);
  CallRecord call;
  for (uint64_t number = next - kept; number < next; ++number)
    if (read(number, call)) calls.push_back(call);
  return calls;
}

const GroupRecord* FlightRecorder::add_group(const std::string& name, const std::string& purpose,
                                             const std::vector<int>& ranks) {
  std::lock_guard lock(mutex_);
  for (const auto& group : groups_)
    if (group->name == name && group->purpose == purpose && group->ranks == ranks) return group.get();
  auto group = std::make_unique<GroupRecord>(GroupRecord{name, purpose, ranks});
  group->index = static_cast<int>(groups_.size());
  group->previous = last_group_.load(std::memory_order_relaxed);
  groups_.push_back(std::move(group));
  last_group_.store(groups_.back().get(), std::memory_order_release);
  return groups_.back().get();
}

void FlightRecorder::add_wait(int64_t ns) noexcept {
  if (std::this_thread::get_id() == main_thread_) waited_ns_.fetch_add(ns, std::memory_order_relaxed);
}

void FlightRecorder::set_activity(const char* name, int64_t step) noexcept {
  activity_since_ns_.store(now_ns(), std::memory_order_relaxed);
  activity_step_.store(step, std::memory_order_relaxed);
  activity_name_.store(name, std::memory_order_release);
}

Activity FlightRecorder::activity() const noexcept {
  Activity activity;
  activity.name = activity_name_.load(std::memory_order_acquire);
  activity.step = activity_step_.load(std::memory_order_relaxed);
  activity.since_ns = activity_since_ns_.load(std::memory_order_relaxed);
  return activity;
}

}  // namespace titan::dist
