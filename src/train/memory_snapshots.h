#pragma once

// [profiling] enable_memory_snapshot: what PyTorch's memory viewer (pytorch.org/memory_viz) loads.

#include <cstdint>
#include <filesystem>

#include <c10/core/Device.h>

#include "titan/train/run_observer.h"

namespace titan::train {

/// From now on allocations are noted: a GPU's by LibTorch's allocator, a CPU's of 1 MiB and more by ours.
void record_memory_history(c10::Device device);

/// Writes {folder}/iteration_{step}/rank{rank}_memory_snapshot.pickle at the end of every `freq`-th step;
/// and, when memory runs out in a step, {folder}/iteration_{the step before}_exit/... What can't be written
/// is told of in the log, and training goes on.
class MemorySnapshots final : public RunObserver {
 public:
  struct Options {
    std::filesystem::path folder;
    int64_t freq = 10;
    c10::Device device;
    int rank = 0;
  };
  explicit MemorySnapshots(Options options);

  void end(Phase phase, int64_t step, bool failed) override;

 private:
  void write(const std::filesystem::path& iteration) const;

  Options options_;
  int64_t num_out_of_memory_;  // before training
};

}  // namespace titan::train
