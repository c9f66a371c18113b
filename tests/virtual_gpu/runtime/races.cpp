#include "runtime/races.h"

#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "runtime/memory.h"

namespace virtual_gpu {
namespace {

struct Access {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  int stream = 0;
  uint64_t number = 0;
  bool is_write = false;
  std::string name;
};

// Accesses are kept by pages, so that one looks at few others.
constexpr int page_bits = 21;
std::unordered_map<uintptr_t, std::vector<Access>>& pages() {
  static auto* p = new std::unordered_map<uintptr_t, std::vector<Access>>;
  return *p;
}
int races = 0;

void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, number] : other) {
    uint64_t& known = clock[stream];
    known = std::max(known, number);
  }
}

// The host's clock. It is one clock for all threads: they hand work to each other under locks that are not seen
// here, so a clock per thread would report races that don't exist.
Clock& host_clock() {
  static auto* clock = new Clock;
  return *clock;
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

void report(const Access& now, const Access& before) {
  std::fprintf(stderr,
               "virtual GPU: RACE: %s %s %zu bytes at %#zx on stream %d, and nothing orders it after %s, "
               "which %s them "
               "on stream %d\n",
               now.name.c_str(), now.is_write ? "writes" : "reads", size_t(now.end - now.begin),
               size_t(now.begin), now.stream, before.name.c_str(), before.is_write ? "wrote" : "read",
               before.stream);
  count_race();
}

void check(const Access& now, const Clock& clock) {
  for (uintptr_t page = now.begin >> page_bits; page <= (now.end - 1) >> page_bits; ++page) {
    std::vector<Access>& list = pages()[page];
    std::erase_if(list, [&](const Access& before) {
      const auto known = clock.find(before.stream);
      const bool is_ordered =
          before.stream == now.stream || (known != clock.end() && known->second >= before.number);
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

void stamp(Stream& stream, Operation& operation) {
  if (!state().settings.checks_races) return;
  join(stream.clock, host_clock());
  const uint64_t number = ++state().num_operations[stream.id];
  stream.clock[stream.id] = number;
  operation.stamp = std::make_shared<const Stamp>(Stamp{stream.id, number, stream.clock});
}

void check_ranges(const Operation& operation) {
  if (!operation.stamp) return;
  const auto& [stream, number, clock] = *operation.stamp;
  for (const Range& range : operation.ranges) {
    if (range.bytes == 0) continue;
    const auto begin = reinterpret_cast<uintptr_t>(range.data);
    check({begin, begin + range.bytes, stream, number, range.is_written, operation.name}, clock);
  }
}

Clock clock_of(Stream& stream) {
  if (!state().settings.checks_races) return {};
  join(stream.clock, host_clock());
  stream.clock[stream.id] = state().num_operations[stream.id];
  return stream.clock;
}

void stream_has_seen(Stream& stream, const Clock& clock) { join(stream.clock, clock); }

void host_has_seen(const Clock& clock) {
  if (!is_watchdog()) join(host_clock(), clock);
}
void host_has_seen(Stream& stream) {
  if (state().settings.checks_races) host_has_seen(clock_of(stream));
}

void check_host_access(const Range& range, const std::string& name) {
  if (!state().settings.checks_races || range.bytes == 0) return;
  const Lock lock(state().mutex);
  const Block* block = find_block(range.data);
  if (!block || !block->is_pinned_host) return;
  constexpr int host = 0;
  const uint64_t number = ++state().num_operations[host];
  host_clock()[host] = number;
  const auto begin = reinterpret_cast<uintptr_t>(range.data);
  check({begin, begin + range.bytes, host, number, range.is_written, name}, host_clock());
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

void count_race() {
  ++races;
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
