#pragma once

// The state in the hosts' memory, beside that on disk: when it is kept, and what a start finds of it.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "checkpoint/peer/peer_folder.h"
#include "titan/checkpoint/checkpointer.h"
#include "train/checkpoints/run_checkpoints.h"

namespace titan::train {

/// Tells a run from others that save elsewhere, even from one in a copy of its folder.
struct RunMark {
  std::string run;     ///< of this run alone: 32 hexadecimal digits
  std::string folder;  ///< where it saves now, for comparing and for people: path and inode
  static void fields(auto& wire, auto& self) { wire(self.run, self.folder); }
};

/// The mark of the run that saves in `folder`, from a file there, which is made if it doesn't exist. A run
/// keeps its mark when its folder is renamed, or seen under another path from another host, while a copy of
/// the folder gets its own. Throws Error.
RunMark run_mark(const std::filesystem::path& folder);

class PeerSaves {
 public:
  /// `disk`: how the run saves on disk; rank 0 leaves a mark in that folder, by which the states in memory
  /// are known as this run's. Collective over the world, as are all calls except is_due.
  PeerSaves(const dist::World& world, const DeviceMesh& pipeline, const PeerSettings& settings,
            const checkpoint::SaveOptions& disk);

  bool is_due(int64_t step) const { return step % settings_.interval == 0; }
  /// Starts to keep the state. Failures are only logged: the run can do without the copy in memory.
  void save(int64_t step);
  /// Waits for what is in progress; logs as save() does.
  void finish();
  /// Logs how many states weren't kept, if any failed.
  void tell_failures() const;

  /// None: the load failed for another reason. Mended: there are sound copies of everything that was damaged,
  /// so another load may succeed. Lost: some of it has no sound copy.
  enum class Damage { None, Mended, Lost };
  /// After loading the chosen generation failed: looks for damage, logs what it found, and removes it.
  Damage remove_damaged();
  /// Logs what is kept where, and how much memory it takes. Throws ConfigError if a host has too little
  /// memory.
  void announce();
  /// The run's state is on disk: removes what is in memory. Logs failures.
  void remove();

  const std::shared_ptr<checkpoint::PeerFolder> folder;
  checkpoint::Checkpointer saver;

 private:
  PeerSettings settings_;
  bool removed_ = false;
};

}  // namespace titan::train
