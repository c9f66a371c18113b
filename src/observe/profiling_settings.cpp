#include "observe/profiling_settings.h"

namespace titan::train {

void describe(config::Table<ProfilingSettings>& table) {
  table.field("enable_profiling", &ProfilingSettings::enable_profiling,
              "write traces of steps, of each rank, for Perfetto and chrome://tracing");
  table.field("save_traces_folder", &ProfilingSettings::save_traces_folder,
              "folder of the traces under dump_folder: iteration_{step}/rank{r}_trace.json.gz");
  table.field("profile_freq", &ProfilingSettings::profile_freq,
              "steps from one trace to the next, and from one memory snapshot to the next",
              config::at_least(1));
  table.field("profiler_active", &ProfilingSettings::profiler_active,
              "steps in a trace, the last of each profile_freq", config::at_least(1));
  table.field("profiler_warmup", &ProfilingSettings::profiler_warmup,
              "steps before them in which the profiler is set up, so that its start isn't in the trace",
              config::at_least(0));
  table.field(
      "enable_memory_snapshot", &ProfilingSettings::enable_memory_snapshot,
      "record each allocation with its call stack, and write what PyTorch's memory viewer loads; on a "
      "CPU of blocks of 1 MiB and more");
  table.field("save_memory_snapshot_folder", &ProfilingSettings::save_memory_snapshot_folder,
              "folder of the snapshots under dump_folder: iteration_{step}/rank{r}_memory_snapshot.pickle");
}

}  // namespace titan::train
