#pragma once

// A rank's flight record as a file: JSON in the form of PyTorch's Flight Recorder (version 2.10), plus a
// table "titan": who the rank is, why the file was written, what the rank was doing. docs/debugging_hangs.md
// shows one; `titan debug flight` joins all ranks' files.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

namespace titan::dist {

class FlightRecorder;

/// A file with this name in the folder of the flight records asks all ranks of a running job to write theirs
/// (`titan debug dump`). Rank 0's watchdog removes it.
inline constexpr const char* kFlightRequest = "dump_request";

/// Which of the kept calls are written. When a job fails, all ranks write and read at once, mostly on shared
/// storage: then the last kLastCalls are enough, with older ones that haven't ended.
enum class FlightExtent : uint8_t { All, Last };
inline constexpr uint64_t kLastCalls = 2000;

class FlightDump {
 public:
  struct Options {
    std::filesystem::path folder;
    std::string prefix = "rank_";  ///< the file is <folder>/<prefix><rank>.json
    int rank = 0;
    int world_size = 1;
    /// Also write when the process gets SIGQUIT (and continues, see survive_sigquit()), and when it dies by a
    /// signal that install_crash_handler() reports. One object per process at a time.
    bool on_signals = false;
  };
  /// Makes the folder, and removes this rank's file of an earlier run.
  FlightDump(std::shared_ptr<const FlightRecorder> recorder, Options options);
  ~FlightDump();
  FlightDump(const FlightDump&) = delete;
  FlightDump& operator=(const FlightDump&) = delete;

  /// Writes a temporary file and renames it; a later write replaces it. Allocates no memory and waits for no
  /// device. `reason` is one line. Returns errno, or 0.
  int write(const char* reason, FlightExtent extent = FlightExtent::All) noexcept;

  const std::filesystem::path& path() const;
  const std::filesystem::path& folder() const;

  struct Writer;

 private:
  // Shared with handlers that may run while this object ends: with on_signals it stays forever.
  std::shared_ptr<Writer> writer_;
};

/// From now on SIGQUIT doesn't end the process, whether there is a record to write or not: users also send it
/// to ranks that haven't begun or are about to end.
void survive_sigquit();

}  // namespace titan::dist
