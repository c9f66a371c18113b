#pragma once

#include "runtime/stream.h"

/// Counts what the device did, by module and by operation or call. A module is the innermost range of at::RecordFunction on the thread
/// that queued the operation. Written as JSON to the file in VIRTUAL_GPU_COUNTERS (with %r replaced by RANK) when the program ends.
namespace virtual_gpu {

struct Count {
  uint64_t launches = 0;  ///< operations that were queued
  uint64_t operations =
      0;  ///< the same, but with VIRTUAL_GPU_LIBTORCH one of aten counts once for all that it launches
  uint64_t bytes_read = 0;       ///< by these; a byte counts once in an operation, here and below
  uint64_t bytes_written = 0;    ///< by these
  uint64_t bytes_requested = 0;  ///< by threads of LibTitan's kernels; a byte counts each time
  uint64_t host_waits = 0;       ///< calls in which the host waited for the device
  uint64_t calls = 0;            ///< other calls: allocations, communicators
  uint64_t bytes = 0;            ///< allocated by these
};

/// An operation's name and the module that the calling thread is in: "aten::mm in layers.3.attention".
std::shared_ptr<const std::string> label_here(const std::string& name);

/// The module that the calling thread is in.
std::shared_ptr<const std::string> module_here();

/// Counts the operation's launch and ranges, in the calling thread's module or the one that it was recorded in, and remembers where accesses
/// that it adds belong.
void count_operation(Operation& operation);
void count_accesses(const Operation& operation, const Accessed& accessed);
void count_host_wait(const std::string& call);
void count_allocation(const std::string& call, size_t bytes);
/// For programs that end without exit(). Writes nothing if nothing was counted, because a launcher shares its rank's file.
void write_counts();

}  // namespace virtual_gpu
