#pragma once

// What a rank leaves behind when the job hangs.

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>

#include "guard/verdict.h"

namespace titan::dist {

class FlightDump;
class FlightRecorder;
class SideThread;

/// The call that this rank, or its device, waits for: "all_gather #12 of group 'dp_shard' (fsdp::unshard
/// layers.3)"; "": none. The checkpointer's own calls count only while the rank loads or saves.
std::string open_call(const FlightRecorder& recorder, ProgressKind kind);

/// Where this rank is, its last calls, and the stacks of all its threads.
std::string hang_report(int rank, const Beat& beat, const FlightRecorder& recorder);

/// folder/stacks_<rank>.txt
std::filesystem::path stacks_path(const std::filesystem::path& folder, int rank);

struct HangFiles {
  int rank = 0;
  std::string report;
  std::filesystem::path folder;         ///< gets the report as stacks_<rank>.txt; may be empty
  std::shared_ptr<FlightDump> records;  ///< writes the flight record, with `reason`; may be null
  std::string reason;
};

/// Writes them on `thread`. What its file system doesn't take within `limit` stays unwritten. Doesn't throw.
void leave_files(const HangFiles& files, SideThread& thread, std::chrono::milliseconds limit);

/// From now on the process ends by itself after `limit`, with kHungExitCode, whatever its threads wait for.
void end_process_after(std::chrono::seconds limit);

}  // namespace titan::dist
