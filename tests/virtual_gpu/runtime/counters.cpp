#include "runtime/counters.h"

#include <cstdio>
#include <cstdlib>
#include <map>

namespace virtual_gpu {
namespace {

struct Count {
  uint64_t launches = 0;
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
};

struct Counters {
  std::map<std::string, Count> operations;
  std::map<std::string, uint64_t> host_waits;
  uint64_t allocations = 0;
  uint64_t allocated_bytes = 0;
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
Counters* counters() {
  static Counters* c = [] {
    if (path_from_environment().empty()) return static_cast<Counters*>(nullptr);
    std::atexit(write_counters);
    return new Counters;
  }();
  return c;
}

// Names of operations and calls need no escapes in JSON: they are identifiers of CUDA, NCCL and aten.
void write_counters() {
  Lock lock(state().mutex);
  std::FILE* file = std::fopen(path_from_environment().c_str(), "w");
  if (!file) {
    std::fprintf(stderr, "virtual GPU: can't write counters to %s\n", path_from_environment().c_str());
    return;
  }
  const Counters& c = *counters();
  std::fprintf(file, "{\n  \"allocations\": %ju,\n  \"allocated_bytes\": %ju,\n  \"host_waits\": {",
               uintmax_t(c.allocations), uintmax_t(c.allocated_bytes));
  const char* separator = "";
  for (const auto& [call, number] : c.host_waits) {
    std::fprintf(file, "%s\n    \"%s\": %ju", separator, call.c_str(), uintmax_t(number));
    separator = ",";
  }
  std::fprintf(file, "\n  },\n  \"operations\": {");
  separator = "";
  for (const auto& [name, count] : c.operations) {
    std::fprintf(file, "%s\n    \"%s\": {\"launches\": %ju, \"bytes_read\": %ju, \"bytes_written\": %ju}",
                 separator, name.c_str(), uintmax_t(count.launches), uintmax_t(count.bytes_read),
                 uintmax_t(count.bytes_written));
    separator = ",";
  }
  std::fprintf(file, "\n  }\n}\n");
  std::fclose(file);
}

}  // namespace

void count_operation(const Operation& operation) {
  Counters* c = counters();
  if (!c) return;
  Count& count = c->operations[operation.name];
  ++count.launches;
  for (const Range& range : operation.ranges)
    (range.is_written ? count.bytes_written : count.bytes_read) += range.bytes;
}

void count_host_wait(const std::string& call) {
  if (Counters* c = counters()) ++c->host_waits[call];
}

void count_allocation(size_t bytes) {
  Counters* c = counters();
  if (!c) return;
  ++c->allocations;
  c->allocated_bytes += bytes;
}

}  // namespace virtual_gpu
