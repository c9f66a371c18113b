#include "runtime/races.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include "runtime/counters.h"
#include "runtime/faults.h"
#include "runtime/memory.h"

namespace virtual_gpu {
namespace {

struct Access {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  int stream = 0;
  uint64_t number = 0;
  bool is_write = false;
  std::shared_ptr<const std::string> label;  // the operation's
  std::shared_ptr<const Calls> calls;
};

// Accesses are kept by pages, so that one looks at few others.
constexpr int page_bits = 21;
std::unordered_map<uintptr_t, std::vector<Access>>& pages() {
  static auto* p = new std::unordered_map<uintptr_t, std::vector<Access>>;
  return *p;
}
int races = 0;

constexpr int first_host_thread = -1000;
struct HostThread {
  int id = 0;  // among the numbers of streams, for its own accesses
  Clock clock;
  uint64_t version = 0;  // changes of the clock
};
HostThread& host_thread() {
  static std::atomic<int> num_threads = 0;
  static thread_local HostThread* thread = new HostThread{first_host_thread - num_threads++, {}, 0};
  return *thread;
}
Clock& host_clock() { return host_thread().clock; }

// Set when a host thread first learns of an operation: before, there is nothing to hand over.
std::atomic<bool> any_is_known = false;

void learn(const Clock& clock) {
  if (!host_clock().join(clock)) return;
  ++host_thread().version;
  any_is_known = true;
}

// The operations that LibTorch's allocator has seen. It gives memory out when all uses of it are over, to any thread.
Clock& allocator_clock() {
  static auto* clock = new Clock;
  return *clock;
}

// The operations of deleted streams, by device.
std::map<int, Clock>& clocks_of_deleted_streams() {
  static auto* clocks = new std::map<int, Clock>;
  return *clocks;
}

struct Code {
  uintptr_t begin = 0, end = 0;
  bool contains(const void* address) const {
    const auto at = reinterpret_cast<uintptr_t>(address);
    return at >= begin && at < end;
  }
};
// The library with this name, if it is loaded.
Code code_of(const char* library) {
  std::pair<const char*, Code> search{library, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* data) {
        auto& [name, code] = *static_cast<std::pair<const char*, Code>*>(data);
        if (!std::strstr(object->dlpi_name, name)) return 0;
        for (int i = 0; i < object->dlpi_phnum; ++i) {
          const auto& header = object->dlpi_phdr[i];
          if (header.p_type == PT_LOAD && header.p_flags & PF_X)
            code = {object->dlpi_addr + header.p_vaddr, object->dlpi_addr + header.p_vaddr + header.p_memsz};
        }
        return 1;
      },
      &search);
  return search.second;
}
Code runtime_code, allocator_code;
std::atomic<bool> allocator_is_found = false;

// The allocator's locks that this thread holds, each as often as it has taken it.
struct Held {
  std::array<const void*, 16> locks{};
  size_t count = 0;
};
thread_local Held held;

bool is_of_allocator(const void* caller) { return allocator_is_found && allocator_code.contains(caller); }

// A clock for each lock that was released. Guarded by a flag, because mutexes lead here.
struct Released {
  Clock clock;
  int thread = 0;
  uint64_t version = 0;
  uint64_t number = 0;  // the last release's, among all releases that were noted
};
std::unordered_map<const void*, Released>& released_locks() {
  static auto* locks = new std::unordered_map<const void*, Released>;
  return *locks;
}
// The knowledge that forgotten locks have handed over. A lock's end isn't seen, and autograd makes new ones in every step, so only those that
// were released last are kept. Whoever takes one that isn't kept may have learned from a forgotten one, so it learns from all of them: races with
// operations that long ago aren't found.
constexpr size_t most_locks = 4096;
Clock& clock_of_forgotten_locks() {
  static auto* clock = new Clock;
  return *clock;
}
void forget_older_locks() {
  std::vector<uint64_t> numbers;
  for (const auto& [lock, released] : released_locks()) numbers.push_back(released.number);
  const auto middle = numbers.begin() + static_cast<ptrdiff_t>(numbers.size() / 2);
  std::nth_element(numbers.begin(), middle, numbers.end());
  std::erase_if(released_locks(), [oldest = *middle](const auto& entry) {
    if (entry.second.number >= oldest) return false;
    clock_of_forgotten_locks().join(entry.second.clock);
    return true;
  });
}
std::atomic_flag locks_are_in_use;
struct UseLocks {
  UseLocks() {
    while (locks_are_in_use.test_and_set(std::memory_order_acquire)) sched_yield();
  }
  ~UseLocks() { locks_are_in_use.clear(std::memory_order_release); }
};

bool counts_as_lock(const void* lock, const void* caller) {
  return any_is_known && lock != &state().mutex && !runtime_code.contains(caller);
}

// NCCL's watchdog asks whether events have happened, but the program doesn't wait for its answers.
bool is_watchdog() {
  thread_local const bool result = [] {
    char name[32] = {};
    pthread_getname_np(pthread_self(), name, sizeof name);
    return std::strncmp(name, "pt_nccl", 7) == 0;
  }();
  return result;
}

std::string place_of(int stream) {
  if (stream <= first_host_thread) return "host thread " + std::to_string(first_host_thread - stream);
  const auto lane = state().lanes.find(stream);
  return lane == state().lanes.end() ? "stream " + std::to_string(stream)
                                     : "stream " + std::to_string(lane->second) + " of a graph's launch";
}

void take_calls(Calls& calls) {
  calls.count = backtrace(calls.frames.data(), static_cast<int>(calls.frames.size()));
}

// Null unless VIRTUAL_GPU_STACKS asks for them: they take a third of a small test's time.
std::shared_ptr<const Calls> calls_here() {
  static const bool wanted = [] {
    const char* given = std::getenv("VIRTUAL_GPU_STACKS");
    return given && std::string_view(given) != "0";
  }();
  if (!wanted) return nullptr;
  auto calls = std::make_shared<Calls>();
  take_calls(*calls);
  return calls;
}

void report(const Access& now, const Access& before) {
  report_fault(
      "virtual GPU: RACE: %s %s %zu bytes at %#zx on %s, and nothing orders it after %s, which %s "
      "them on %s\n",
      now.label->c_str(), now.is_write ? "writes" : "reads", size_t(now.end - now.begin), size_t(now.begin),
      place_of(now.stream).c_str(), before.label->c_str(), before.is_write ? "wrote" : "read",
      place_of(before.stream).c_str());
  for (const Access& access : {now, before}) {
    if (!access.calls) continue;
    report_fault("  %s was called by\n", access.label->c_str());
    print_calls(*access.calls);
  }
  count_race();
}

void check(const Access& now, const Clock& clock) {
  for (uintptr_t page = now.begin >> page_bits; page <= (now.end - 1) >> page_bits; ++page) {
    std::vector<Access>& list = pages()[page];
    std::erase_if(list, [&](const Access& before) {
      const bool is_ordered = before.stream == now.stream || clock[before.stream] >= before.number;
      const bool overlaps = before.begin < now.end && now.begin < before.end;
      if (overlaps && !is_ordered && (now.is_write || before.is_write)) {
        report(now, before);
        return true;  // one report is enough
      }
      // If this access covers the earlier one, later races with that one are races with this one, too.
      return is_ordered && (now.is_write || !before.is_write) && before.begin >= now.begin &&
             before.end <= now.end;
    });
    list.push_back(now);
  }
}

}  // namespace

uint64_t Clock::operator[](int stream) const {
  const auto found = std::ranges::lower_bound(numbers_, stream, {}, &std::pair<int, uint64_t>::first);
  return found != numbers_.end() && found->first == stream ? found->second : 0;
}
void Clock::set(int stream, uint64_t number) {
  const auto found = std::ranges::lower_bound(numbers_, stream, {}, &std::pair<int, uint64_t>::first);
  if (found != numbers_.end() && found->first == stream)
    found->second = number;
  else
    numbers_.insert(found, {stream, number});
}
bool Clock::join(const Clock& other) {
  bool changes = false;
  size_t at = 0;
  for (const auto& [stream, number] : other.numbers_) {
    while (at < numbers_.size() && numbers_[at].first < stream) ++at;
    if (at == numbers_.size() || numbers_[at].first != stream)
      numbers_.insert(numbers_.begin() + static_cast<ptrdiff_t>(at), {stream, 0});
    if (numbers_[at].second >= number) continue;
    numbers_[at].second = number;
    changes = true;
  }
  return changes;
}

void stamp(Stream& stream, Operation& operation) {
  if (!state().settings.checks_races) return;
  stream.clock.join(host_clock());
  if (operation.is_bookkeeping)
    stream.clock.join(operation.stamp ? operation.stamp->clock : allocator_clock());
  const uint64_t number = ++state().num_operations[stream.id];
  stream.clock.set(stream.id, number);
  operation.stamp = std::make_shared<const Stamp>(
      Stamp{stream.id, number, stream.clock, operation.stamp ? operation.stamp->calls : calls_here()});
}

void stamp_captured(Operation& operation) {
  if (!state().settings.checks_races) return;
  const Clock known = operation.is_bookkeeping ? allocator_clock() : Clock{};
  operation.stamp = std::make_shared<const Stamp>(Stamp{0, 0, known, calls_here()});
}

void check_ranges(const Operation& operation) {
  if (!operation.stamp) return;
  const auto& [stream, number, clock, calls] = *operation.stamp;
  for (const Range& range : operation.ranges) {
    if (range.bytes == 0) continue;
    const auto begin = reinterpret_cast<uintptr_t>(range.data);
    check({begin, begin + range.bytes, stream, number, range.is_written, operation.label, calls}, clock);
  }
}

Clock clock_of(Stream& stream) {
  if (!state().settings.checks_races) return {};
  stream.clock.join(host_clock());
  stream.clock.set(stream.id, state().num_operations[stream.id]);
  return stream.clock;
}

void stream_has_seen(Stream& stream, const Clock& clock) { stream.clock.join(clock); }

void find_allocator() {
  runtime_code = code_of("libcudart.so.13");
  allocator_code = code_of("libc10_cuda.so");
  allocator_is_found = true;
}

void host_has_seen(const Clock& clock) {
  if (held.count > 0) {
    allocator_clock().join(clock);
  } else if (!is_watchdog()) {
    learn(clock);
    deliver(clock);
  }
}
void host_has_seen(Stream& stream) {
  if (state().settings.checks_races) host_has_seen(clock_of(stream));
}
void host_has_seen_device(int device) {
  for (const auto& stream : state().streams)
    if (stream->device == device) host_has_seen(*stream);
  host_has_seen(clocks_of_deleted_streams()[device]);
}
void note_end(const Stream& stream) {
  clocks_of_deleted_streams()[stream.device].join(stream.clock);
  if (!stream.is_lane) state().unused_streams.push_back(stream.id);
}
int new_stream_id() {
  std::vector<int>& unused = state().unused_streams;
  const auto known =
      std::ranges::find_if(unused, [](int id) { return host_clock()[id] >= state().num_operations[id]; });
  if (known == unused.end()) return state().next_stream++;
  const int id = *known;
  unused.erase(known);
  state().lanes.erase(id);
  return id;
}

void take_lock(const void* lock, const void* caller) {
  if (is_of_allocator(caller)) {
    if (held.count < held.locks.size()) held.locks[held.count++] = lock;
    return;
  }
  if (!counts_as_lock(lock, caller)) return;
  const UseLocks use;
  const auto found = released_locks().find(lock);
  learn(found == released_locks().end() ? clock_of_forgotten_locks() : found->second.clock);
}
void release_lock(const void* lock, const void* caller) {
  // By the lock, because a function whose last act is to release it isn't the caller any more.
  const auto end = held.locks.begin() + static_cast<ptrdiff_t>(held.count);
  if (const auto found = std::find(held.locks.begin(), end, lock); found != end) {
    std::copy(found + 1, end, found);
    --held.count;
    return;
  }
  if (!counts_as_lock(lock, caller) || host_clock().empty()) return;
  const HostThread& thread = host_thread();
  const UseLocks use;
  if (released_locks().size() >= most_locks) forget_older_locks();
  static uint64_t num_releases = 0;
  Released& released = released_locks()[lock];
  if (released.thread == thread.id && released.version == thread.version) return;
  released.number = ++num_releases;
  released.clock.join(thread.clock);
  released.thread = thread.id;
  released.version = thread.version;
}
std::shared_ptr<const Clock> known_to_host_thread() {
  return any_is_known ? std::make_shared<const Clock>(host_clock()) : nullptr;
}
void host_thread_knows(const Clock& clock) { learn(clock); }

void check_host_access(const Range& range, const std::string& name) {
  if (!state().settings.checks_races || range.bytes == 0) return;
  const Lock lock(state().mutex);
  const Block* block = find_block(range.data);
  if (!block || !block->is_pinned_host) return;
  const int host = host_thread().id;
  const uint64_t number = ++state().num_operations[host];
  host_clock().set(host, number);
  any_is_known = true;
  ++host_thread().version;
  const auto begin = reinterpret_cast<uintptr_t>(range.data);
  check({begin, begin + range.bytes, host, number, range.is_written, label_here(name), calls_here()},
        host_clock());
}

void forget_range(const void* data, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  for (uintptr_t page = begin >> page_bits; page <= (begin + bytes - 1) >> page_bits; ++page) {
    const auto found = pages().find(page);
    if (found == pages().end()) continue;
    std::erase_if(found->second, [&](const Access& a) { return a.begin < begin + bytes && begin < a.end; });
    if (found->second.empty()) pages().erase(found);
  }
}

void print_calls(const Calls& calls) {
  constexpr std::string_view others[] = {"libtorch",  "libc10",           "libcudart",    "libkernels.",
                                         "libnccl",   "libtitan_kernels", "libc_library", "libc.",
                                         "libstdc++", "ld-linux"};
  for (int i = 0; i < calls.count; ++i) {
    Dl_info info{};
    char* const call = static_cast<char*>(calls.frames[i]) - 1;  // the address is that after the call
    if (dladdr(call, &info) == 0 || !info.dli_fname) continue;
    const std::string_view path = info.dli_fname, object = path.substr(path.rfind('/') + 1);
    if (std::ranges::any_of(others, [&](std::string_view other) { return object.starts_with(other); }))
      continue;
    char* const name =
        info.dli_sname ? abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, nullptr) : nullptr;
    report_fault("    %.*s+%#tx %s\n", static_cast<int>(object.size()), object.data(),
                 call - static_cast<char*>(info.dli_fbase),
                 name             ? name
                 : info.dli_sname ? info.dli_sname
                                  : "");
    std::free(name);
  }
}

void print_calls_here() {
  Calls calls;
  take_calls(calls);
  print_calls(calls);
}

void count_race() {
  ++races;
  end_at_fault();
}
void end_at_fault() {
  if (state().settings.ends_at_race) std::abort();
}

}  // namespace virtual_gpu

// Waits for what is queued, because accesses are checked when operations have run.
extern "C" int virtual_gpu_num_races() {
  using namespace virtual_gpu;
  Lock lock(state().mutex);
  for (int device = 0; device < state().settings.num_devices; ++device) wait_for_device(lock, device);
  return races;
}
