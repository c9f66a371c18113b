#include "runtime/counters.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

namespace virtual_gpu {
namespace {

using CountsOfModule = std::map<std::string, Count>;  // by operation or call
using Counters = std::map<std::string, CountsOfModule>;

constexpr std::pair<const char*, uint64_t Count::*> fields[] = {
    {"launches", &Count::launches},
    {"operations", &Count::operations},
    {"bytes_read", &Count::bytes_read},
    {"bytes_written", &Count::bytes_written},
    {"bytes_requested", &Count::bytes_requested},
    {"host_waits", &Count::host_waits},
    {"calls", &Count::calls},
    {"bytes", &Count::bytes},
};

std::string path_from_environment() {
  const char* path = std::getenv("VIRTUAL_GPU_COUNTERS");
  if (!path) return {};
  std::string result = path;
  const char* rank = std::getenv("RANK");
  if (const size_t at = result.find("%r"); at != std::string::npos) result.replace(at, 2, rank ? rank : "0");
  return result;
}

void write_counters();

// Null if nobody asked for them.
Counters*& counters() {
  static Counters* c = [] {
    if (path_from_environment().empty()) return static_cast<Counters*>(nullptr);
    std::atexit(write_counters);
    return new Counters;
  }();
  return c;
}

// Names of operations, calls and modules need no escapes in JSON: they are identifiers.
void write_counters() {
  const Lock lock(state().mutex);
  std::FILE* file = std::fopen(path_from_environment().c_str(), "w");
  if (!file) {
    std::fprintf(stderr, "virtual GPU: can't write counters to %s\n", path_from_environment().c_str());
    return;
  }
  const char* module_separator = "{";
  for (const auto& [module, counts] : *counters()) {
    std::fprintf(file, "%s\n  \"%s\": ", module_separator, module.c_str());
    module_separator = ",";
    const char* separator = "{";
    for (const auto& [name, count] : counts) {
      std::fprintf(file, "%s\n    \"%s\": ", separator, name.c_str());
      separator = ",";
      const char* field_separator = "{";
      for (const auto& [field, value] : fields) {
        if (count.*value == 0) continue;
        std::fprintf(file, "%s\"%s\": %ju", field_separator, field, uintmax_t{count.*value});
        field_separator = ", ";
      }
      std::fprintf(file, "}");
    }
    std::fprintf(file, "\n  }");
  }
  std::fprintf(file, "%s\n}\n", counters()->empty() ? "{" : "");
  std::fclose(file);
}

thread_local std::vector<std::string> open_modules;

thread_local int own_depth = 0;
thread_local std::chrono::steady_clock::time_point own_begin;
std::atomic<uint64_t> own_ns = 0;

const std::string& open_module() {
  static const std::string none;
  return open_modules.empty() ? none : open_modules.back();
}

// The calls of the module that this thread is in; null if nobody counts.
CountsOfModule* counts_here() { return counters() ? &(*counters())[open_module()] : nullptr; }

}  // namespace

OwnWork::OwnWork() {
  if (own_depth++ == 0) own_begin = std::chrono::steady_clock::now();
}
OwnWork::~OwnWork() {
  if (--own_depth > 0) return;
  const std::chrono::nanoseconds passed = std::chrono::steady_clock::now() - own_begin;
  own_ns += static_cast<uint64_t>(passed.count());
}

bool needs_modules() { return counters() || state().settings.checks_races; }
void write_counts() {
  if (!counters()) return;
  const bool has_counted = [] {
    const Lock lock(state().mutex);
    return !counters()->empty();
  }();
  if (has_counted) write_counters();
}
void enter_module(std::string name) { open_modules.push_back(std::move(name)); }
void leave_module() {
  if (!open_modules.empty()) open_modules.pop_back();
}

std::shared_ptr<const std::string> label_here(const std::string& name) {
  return std::make_shared<const std::string>(open_modules.empty() ? name : name + " in " + open_module());
}
std::shared_ptr<const std::string> module_here() {
  return std::make_shared<const std::string>(open_module());
}

void count_operation(Operation& operation) {
  if (operation.is_bookkeeping || !counters()) return;
  CountsOfModule& counts = operation.recorded_in ? (*counters())[*operation.recorded_in] : *counts_here();
  operation.count = &counts[operation.name];
  ++operation.count->launches;
  if (!operation.is_continued) ++operation.count->operations;
  count_accesses(operation, {operation.ranges});
}

void count_accesses(const Operation& operation, const Accessed& accessed) {
  if (!operation.count) return;
  operation.count->bytes_requested += accessed.bytes_requested;
  for (const Range& range : accessed.ranges) {
    if (range.is_written) operation.count->bytes_written += range.bytes;
    if (!range.is_written || range.is_read_too) operation.count->bytes_read += range.bytes;
  }
}

void count_host_wait(const std::string& call) {
  if (CountsOfModule* counts = counts_here()) ++(*counts)[call].host_waits;
}

void count_allocation(const std::string& call, size_t bytes) {
  CountsOfModule* counts = counts_here();
  if (!counts) return;
  Count& count = (*counts)[call];
  ++count.calls;
  count.bytes += bytes;
}

void count_call(const std::string& call) {
  const Lock lock(state().mutex);
  count_allocation(call, 0);
}

}  // namespace virtual_gpu

using namespace virtual_gpu;

extern "C" {

// For benchmarks: the time that threads have spent in OwnWork.
uint64_t virtual_gpu_own_ns() { return own_ns; }

// For tests: counts from zero from now on.
void virtual_gpu_start_counting() {
  Lock lock(state().mutex);
  for (int device = 0; device < state().settings.num_devices; ++device) wait_for_device(lock, device);
  if (!counters()) counters() = new Counters;
  counters()->clear();
}

// For benchmarks: writes the file of VIRTUAL_GPU_COUNTERS before the program's end.
void virtual_gpu_write_counts() { write_counts(); }

// For tests: the sum of a field of Count over modules whose names begin so, and over names; null stands for all of them.
uint64_t virtual_gpu_count(const char* field, const char* module, const char* name) {
  Lock lock(state().mutex);
  for (int device = 0; device < state().settings.num_devices; ++device) wait_for_device(lock, device);
  uint64_t sum = 0;
  for (const auto& [of_module, counts] : *counters())
    for (const auto& [of_name, count] : counts)
      for (const auto& [of_field, value] : fields)
        if (std::strcmp(field, of_field) == 0 && of_module.starts_with(module ? module : "") &&
            (!name || of_name == name))
          sum += count.*value;
  return sum;
}

}  // extern "C"
