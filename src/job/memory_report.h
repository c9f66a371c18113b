#pragma once

// What has a rank's memory, and which settings would make it less: for the moment when it runs out.

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
  std::string details;  ///< what it comes to it by
};

struct MemorySaving {
  std::string setting;  ///< "training.local_batch_size = 4"
  double bytes = 0;
};

/// Of one rank, at the fullest moment of a step: the end of the last forward that is under way.
struct MemoryReport {
  std::vector<MemoryOwner> owners;    ///< most first
  std::vector<MemorySaving> savings;  ///< most first; each by itself
  double total_bytes() const;
};

/// Computed from sizes, on meta tensors, as titan::train::DryRun does: it needs no memory of the device, and
/// no peers. What operations need while they run, buffers of the communication library and what the allocator
/// can't hand out for being in pieces isn't in it. The config has passed check_job for that size.
MemoryReport memory_report(const JobConfig& config, int world_size, int rank, c10::Device device);

/// Whether memory of a host or device ran out: by the exception's type, or by what it says.
bool is_out_of_memory(const std::exception& error);

/// For the log of the rank it happened on: the report as a table, and how much was in use. "" where the
/// report can't be made, as for models that don't name their layers.
std::string explain_out_of_memory(const JobConfig& config, const dist::World& world);

}  // namespace titan::train
