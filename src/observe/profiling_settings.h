#pragma once

// [profiling]: traces of steps for Perfetto, and snapshots of memory for PyTorch's viewer.

#include <cstdint>
#include <string>

#include "titan/config/table.h"

namespace titan::train {

/// [profiling]
struct ProfilingSettings {
  bool enable_profiling = false;
  std::string save_traces_folder = "profile_traces";  ///< under dump_folder
  int64_t profile_freq = 10;                          ///< steps from one trace, or snapshot, to the next
  int64_t profiler_active = 1;                        ///< steps in a trace: the last of each profile_freq
  int64_t profiler_warmup = 3;  ///< steps before them in which the profiler is set up already
  bool enable_memory_snapshot = false;
  std::string save_memory_snapshot_folder = "memory_snapshot";  ///< under dump_folder
};

void describe(config::Table<ProfilingSettings>& table);

}  // namespace titan::train
