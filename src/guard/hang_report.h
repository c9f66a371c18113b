#pragma once

// What a rank leaves behind when the job hangs.

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>

#include "dist/flight_record.h"
#include "guard/verdict.h"

namespace titan::dist {

/// The call that this rank waits for, or its device: "all_gather #12 of group 'dp_shard' (fsdp::unshard
/// layers.3)"; "": none. While it loads or saves the checkpointer's own calls are among them.
std::string open_call(const FlightRecorder& recorder, ProgressKind kind);

/// Where this rank is, its last calls, and where all its threads are.
std::string hang_report(int rank, const Beat& beat, const FlightRecorder& recorder);

/// folder/stacks_<rank>.txt
std::filesystem::path stacks_path(const std::filesystem::path& folder, int rank);

/// Writes `report` to its file where `folder` isn't empty, and the flight record where there is one. Where
/// their file system doesn't do it within `limit`, they stay unwritten. Doesn't throw.
void leave_files(int rank, const std::string& report, const std::filesystem::path& folder,
                 std::shared_ptr<FlightDump> flight, const std::string& reason,
                 std::chrono::milliseconds limit);

/// From now on the process ends by itself after `limit`, with kHungExitCode, whatever its threads wait for.
void end_process_after(std::chrono::seconds limit);

}  // namespace titan::dist
