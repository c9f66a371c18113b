#pragma once

// What tells a run from others that save elsewhere, also behind a copy of its folder: a file in it.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/peer/peer_folder.h"
#include "titan/checkpoint/checkpointer.h"
#include "train/checkpoints/run_checkpoints.h"

namespace titan::train {

struct RunMark {
  std::string run;     ///< of this run alone: 32 hexadecimal digits
  std::string folder;  ///< where it saves now, for comparing and for people: path and inode
};

/// Of the run that saves in `folder`, from the file there, which is made where there is none. A run keeps its
/// mark when its folder is renamed, or seen by another path from another host, while a copy of the folder
/// gets a mark of its own. Throws Error.
RunMark run_mark(const std::filesystem::path& folder);

// The state in memory of the hosts, beside that on disk: when it is kept, and what a start finds of it.

class PeerSaves {
 public:
  /// `disk`: how the run saves there, in the folder that this run's generations belong to; rank 0 leaves a
  /// mark in it. Collective over the world, as are all calls but add, is_due and the getters.
  PeerSaves(const dist::World& world, const DeviceMesh& pipeline, const PeerSettings& settings,
            const checkpoint::SaveOptions& disk);

  void add(const std::string& key, checkpoint::Stateful& object) { saver_.add(key, object); }
  bool is_due(int64_t step) const { return step % settings_.interval == 0; }
  /// Begins to keep the state. What goes wrong is logged: what is in memory is an extra, without which a run
  /// goes on.
  void save(int64_t step);
  void wait_for_staging() { saver_.wait_for_staging(); }
  /// Nothing is under way afterwards; logs as save() does.
  void finish();
  double take_blocked_seconds() { return saver_.take_blocked_seconds(); }
  /// How many states weren't kept, where any failed.
  void tell_failures() const;

  /// The newest generation's step.
  std::optional<int64_t> choose_newest() { return folder_->choose_newest(); }
  std::filesystem::path step_path(int64_t step) const;
  /// Whether it is a generation's, and not a step's on disk.
  bool holds(const std::filesystem::path& step_folder) const;
  /// For loading the chosen generation.
  void add_bringer(checkpoint::LoadOptions& options) const;
  /// None: the load failed for another reason. Mended: of all that was damaged there are sound copies, so
  /// that another load may go well. Lost: of some of it there are none.
  enum class Damage { None, Mended, Lost };
  /// Behind a load of the chosen generation that failed: looks for damage, says what it found, and removes
  /// it.
  Damage remove_damaged();
  /// There is nothing to go on from any more.
  void forget() { folder_->forget(); }
  /// Says in the log what is kept where, and what it takes. Throws ConfigError where a host has too little
  /// memory.
  void announce();
  /// The run's state is on disk. Logs what goes wrong.
  void remove();

 private:
  PeerSettings settings_;
  std::shared_ptr<checkpoint::PeerFolder> folder_;
  checkpoint::Checkpointer saver_;
  bool removed_ = false;
};

}  // namespace titan::train
