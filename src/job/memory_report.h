#pragma once

// What uses a rank's memory, and which settings would use less: for a run that is out of memory.

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "job/job_config.h"
#include "titan/dist/world.h"

namespace titan::train {

struct MemoryOwner {
  std::string name;
  double bytes = 0;
  std::string details;  ///< how the number comes about
};

struct MemorySaving {
  std::string setting;  ///< "training.local_batch_size = 4"
  double bytes = 0;
};

struct NamedBytes {
  std::string name;
  double bytes = 0;
};

/// "layers.0 to layers.31 0.30 each, output 0.61", in GiB: neighbours of about the same size share an entry.
std::string list_of(const std::vector<NamedBytes>& list);

/// One rank's memory at the peak of a step: the end of the last forward before a backward.
struct MemoryReport {
  std::vector<MemoryOwner> owners;    ///< largest first
  std::vector<MemorySaving> savings;  ///< largest first; each on its own
  double total_bytes() const;
};

/// Computed from sizes, on meta tensors, as titan::train::DryRun does: it needs no device memory and no peers.
/// Not included: temporary memory of operations, buffers of the communication library, and fragmentation of
/// the allocator. The config must have passed check_job() for that world size.
MemoryReport memory_report(const JobConfig& config, int world_size, int rank, c10::Device device);

/// A line for each owner and each saving.
std::string table_of(const MemoryReport& report);

/// Whether a host or device ran out of memory: by the exception's type, or by its text.
bool is_out_of_memory(const std::exception& error);

/// For the log of the rank that ran out: the report as a table, and how much was in use. "" when there is no
/// report, as for models that don't name their layers.
std::string explain_out_of_memory(const JobConfig& config, const dist::World& world);

}  // namespace titan::train
