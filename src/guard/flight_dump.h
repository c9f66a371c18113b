#pragma once

// A rank's flight record as a file: JSON in the form of PyTorch's Flight Recorder (version 2.10), with a
// table "titan" for what that lacks: who the rank is, why the file was written, what the rank was doing.
// docs/debugging_hangs.md shows one; `titan debug flight` joins those of all ranks.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

namespace titan::dist {

class FlightRecorder;

/// Which of the calls that are kept are written. Where a whole job fails all ranks write and read at once, on
/// storage that they mostly share: there the last ones are enough, with those that haven't ended.
enum class FlightExtent : uint8_t { All, Last };
inline constexpr uint64_t kLastCalls = 2000;

class FlightDump {
 public:
  struct Options {
    std::filesystem::path folder;
    std::string prefix = "rank_";  ///< the file is <folder>/<prefix><rank>.json
    int rank = 0;
    int world_size = 1;
    /// Also write when the process gets SIGQUIT (and goes on, see survive_sigquit()), and when it dies by a
    /// signal that install_crash_handler() reports. One object of the process at a time.
    bool on_signals = false;
  };
  /// Makes the folder, and removes what an earlier run left of this rank's.
  FlightDump(std::shared_ptr<const FlightRecorder> recorder, Options options);
  ~FlightDump();
  FlightDump(const FlightDump&) = delete;
  FlightDump& operator=(const FlightDump&) = delete;

  /// Writes the file beside its place and renames it there; a later one replaces it. Takes no memory and asks
  /// no device. `reason` is one line. Returns errno, or 0.
  int write(const char* reason, FlightExtent extent = FlightExtent::All) noexcept;
  /// The same where only async-signal-safe functions may be called. Does nothing while another does.
  int write_in_handler(const char* reason) noexcept;

  const std::filesystem::path& path() const;
  const std::filesystem::path& folder() const;

  struct Writer;

 private:
  // Shared with handlers that run while this goes: of an object that watches signals it stays.
  std::shared_ptr<Writer> writer_;
};

/// write() of the object that watches signals; ENOENT where there is none. For whoever ends the process.
int write_flight_dump(const char* reason) noexcept;

/// From now on SIGQUIT doesn't end the process, whether there is a record to write or not: it is asked for by
/// hand, also of ranks that haven't begun or are about to end.
void survive_sigquit();

}  // namespace titan::dist
