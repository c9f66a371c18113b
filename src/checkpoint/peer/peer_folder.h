#pragma once

// [Note: peer checkpoints]
// The state in memory of the hosts, for ranks that are started again: a rank that is lost then costs a few
// steps and no read of a disk. It is made of the same files as a checkpoint on disk.
//
//   place        the ranks that see one folder in a host's memory: usually those of a host
//   folder       PARENT/titan-peers-UID-...: of one job and one run, mode 0700
//   generation   FOLDER/step-N with the manifest, the files of the place's own ranks, and copies
//   copy         of a rank's file, at the next place: what a lost host had is there. With one place there are
//                none: a lost process takes no file with it, and a lost host would take both
//
// The newest complete generation stays until the next one is complete at all places (peer_writer.h). When the
// ranks start again, they look together which generation all files are found of, wherever they lie, and what
// a place lacks of what its ranks read is brought there.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "titan/checkpoint/checkpointer.h"
#include "titan/checkpoint/manifest.h"
#include "titan/dist/world.h"

namespace titan::checkpoint {

/// The job's folder in this host's memory.
class PeerFolder {
 public:
  struct Options {
    std::filesystem::path parent = "/dev/shm";
    std::string job;  ///< the same when its ranks are started again, and no other job's
    std::string run;  ///< whose generations another run of the same job doesn't load
    /// Which folder on disk the run saves in: what earlier jobs of the run left is removed where they saved
    /// in the same one.
    std::string owner = {};
    /// Where the run saves: end_peer_folders() saves a generation there. Empty: it can't.
    std::filesystem::path disk = {};
  };

  /// Makes the folder, or opens what the ranks before these left there; removes what earlier jobs of the same
  /// run left. Collective over the world, as all calls but the getters are. Throws ConfigError on all ranks
  /// where one can't have such a folder, or where two hosts share one.
  PeerFolder(const dist::World& world, Options options);
  ~PeerFolder();
  PeerFolder(const PeerFolder&) = delete;
  PeerFolder& operator=(const PeerFolder&) = delete;

  const std::filesystem::path& path() const;
  int num_places() const;
  /// Where this rank's file is copied to; -1: nowhere.
  int copy_target() const;
  /// Whose files come to this rank.
  std::vector<int> copy_sources() const;
  /// This rank acts for its place.
  bool is_leader() const;

  /// The step of the newest generation that all files are found of. From then on each place has its manifest,
  /// and no other generation.
  std::optional<int64_t> choose_newest();
  /// Of the chosen generation: for LoadOptions.
  void bring_files(const Manifest& manifest, const std::set<int64_t>& ranks);

  struct Damage {
    std::vector<std::string> found;  ///< a line for each file, with rank, host and path
    bool is_whole = true;            ///< of every file a sound one is left at some place
  };
  /// Of the chosen generation: compares every byte of its files, at all places, with its checksums, and
  /// removes those that are damaged. Where it is whole behind that, bring_files brings what sound copies
  /// there are. Throws Error on all ranks where they can't be read at all.
  Damage remove_damaged();
  /// Removes all generations, at all places: the run goes on from something else.
  void forget();
  /// Removes the folder: the job has come to its end.
  void remove();

  /// What two generations with their copies, and the copy that training doesn't wait beyond, take at the
  /// place that has most, and what it has for them.
  struct Memory {
    int64_t files_bytes = 0;   ///< of the folder
    int64_t staged_bytes = 0;  ///< of the processes
    int64_t free_bytes = 0;    ///< for files, what generations take that are there included
    bool in_memory = true;     ///< else the folder is on a disk of the host
  };
  /// Throws ConfigError on all ranks where a place has too little.
  Memory check_memory(const SaveSize& own);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A state that was in memory alone when its job ended.
struct LeftState {
  int64_t step = 0;
  std::filesystem::path memory;     ///< the generation's folder
  std::filesystem::path disk = {};  ///< the step's folder that is made of it
  std::string problem = {};         ///< why it couldn't be, and stays in memory; empty: it is on disk
};

/// For the launcher of a job that ends, when none of its ranks runs: removes the folders of the job that
/// `parent` has, whichever run they are of. What is newer in them than all complete steps on the run's disk
/// is saved there before, as far as this host has all files of it. `gives_up` is asked behind each few MiB,
/// and returns true to have no more saved. Doesn't throw.
std::vector<LeftState> end_peer_folders(const std::filesystem::path& parent, const std::string& job,
                                        const std::function<bool()>& gives_up = {});

}  // namespace titan::checkpoint
