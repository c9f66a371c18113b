#pragma once

// The report, the files and the reason that a rank leaves when the job hangs or when it fails.

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>

#include "guard/mail.h"

namespace titan {
class SideThread;
}

namespace titan::dist {

class FlightDump;
class FlightRecorder;

/// The call that this rank, or its device, waits for: "all_gather #12 of group 'dp_shard' (fsdp::all_gather
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

/// Writes them on `thread`, as far as the file system takes them within `limit`. Doesn't throw.
void leave_files(const HangFiles& files, SideThread& thread, std::chrono::milliseconds limit);

/// From now on the process ends by itself after `limit`, with kHungExitCode, whatever its threads wait for.
void end_process_after(std::chrono::seconds limit);

/// Longest wait of a failing rank for its own record.
inline constexpr std::chrono::milliseconds kRecordWithin{1000};

/// Launchers report the first rank to end as the one that failed, so ranks that aren't to blame end this much
/// later.
inline constexpr std::chrono::milliseconds kCulpritsFirst{1500};

/// The part of kExplainsWithin that these two leave for finding the cause.
inline constexpr std::chrono::milliseconds kFindsCauseWithin =
    kExplainsWithin - kRecordWithin - kCulpritsFirst;

/// Prefix of the reason in records that are written because a rank failed.
inline constexpr const char* kFailureOf = "failure of ";
/// In place of a rank: the cause is known.
inline constexpr const char* kTheJob = "the job";
/// A host is the cause.
inline constexpr const char* kHostIsGone = "failure of the job: host ";

/// The facts that a failing rank knows.
struct FailureScene {
  int rank = 0, size = 1;
  std::string failure;         ///< one line
  bool is_about_peer = false;  ///< a call to its peers failed, probably because one of them did
  Mail::Connect connect;
  std::filesystem::path records;  ///< folder of the flight records; empty: none are written
  std::string record_request;     ///< why this rank was last asked for its record; may be empty
  /// The last words of rank 0, whose process may keep the store; may be empty.
  std::string first_rank_last_words;
};

/// Whether this is the error of one of this rank's last calls, possibly within a longer text.
bool is_error_of_call(const std::string& error, const FlightRecorder& recorder);

/// Returns the same line on all ranks that fail. Blocks as long as the store does; otherwise returns within
/// kFindsCauseWithin.
Explanation explain_failure(const FailureScene& scene);

/// The explanation of a rank that cannot ask the others: `known` says why.
Explanation explain_alone(const FailureScene& scene, const std::string& known);

}  // namespace titan::dist
