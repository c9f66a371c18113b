#pragma once

// Checkpoints in the hosts' memory, in addition to those on disk: saving, checking and removing them.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "checkpoint/peer/peer_folder.h"
#include "titan/checkpoint/checkpointer.h"
#include "train/checkpoints/run_checkpoints.h"

namespace titan::train {

/// Distinguishes a run from others that save elsewhere, even from one in a copy of its folder.
struct RunMark {
  std::string run;     ///< unique to the run: 32 hexadecimal digits
  std::string folder;  ///< where it saves now: path and inode, to compare and to show
  static void fields(auto& wire, auto& self) { wire(self.run, self.folder); }
};

/// The mark of the run that saves in `folder`, read from a file there, which is written if it doesn't exist.
/// A run keeps its mark when its folder is renamed, or has another path on another host, while a copy of the
/// folder gets a new one. Throws Error.
RunMark run_mark(const std::filesystem::path& folder);

class PeerSaves {
 public:
  /// `disk`: how the run saves on disk. Rank 0 leaves a mark in that folder, which identifies the states in
  /// memory as this run's. Collective over the world, as are all calls except is_due.
  PeerSaves(const dist::World& world, const DeviceMesh& pipeline, const PeerSettings& settings,
            const checkpoint::SaveOptions& disk);

  bool is_due(int64_t step) const { return step % settings_.interval == 0; }
  /// Starts saving the state. Failures are only logged: the run can do without the copy in memory.
  void save(int64_t step);
  /// Waits for saves in progress. Logs failures, as save() does.
  void finish();
  /// Logs how many states weren't kept, if any failed.
  void log_failures() const;

  /// None: the load failed for another reason. Mended: there are sound copies of everything that was damaged,
  /// so another load may succeed. Lost: some of it has no sound copy.
  enum class Damage { None, Mended, Lost };
  /// After loading the chosen generation failed: looks for damage, logs what it found, and removes it.
  Damage remove_damaged();
  /// Logs where states are kept and how much memory they take. Throws ConfigError if a host has too little
  /// memory.
  void announce();
  /// Removes the states in memory, once the run's state is on disk. Logs failures.
  void remove();

  const std::shared_ptr<checkpoint::PeerFolder> folder;
  checkpoint::Checkpointer saver;

 private:
  PeerSettings settings_;
  bool removed_ = false;
};

}  // namespace titan::train
