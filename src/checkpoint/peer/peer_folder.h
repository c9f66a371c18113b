#pragma once

// [Note: peer checkpoints] Peer checkpoints keep the state in the hosts' memory, for ranks that are
// restarted: a lost rank then costs a few steps, and nothing is read from disk. A generation consists of the
// same files as a checkpoint on disk.
//
//   place        the ranks that see one folder in a host's memory: usually all ranks of a host
//   folder       PARENT/titan-peers-UID-..., for one job and one run, mode 0700
//   generation   FOLDER/step-N with the manifest, the files of the place's own ranks, and copies
//   copy         a rank's file at the next place, where it survives the loss of the rank's host. With one
//                place there are no copies: a lost process takes no file with it, a lost host would take both
//
// The newest complete generation stays until the next one is complete at all places (peer_writer.h). When the
// ranks are restarted, they determine together the newest generation of which every file exists somewhere.
// Files that a place's ranks need but the place lacks are sent there.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "titan/checkpoint/checkpointer.h"
#include "titan/checkpoint/manifest.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/dist/collectives.h"
#include "titan/dist/world.h"

namespace titan::checkpoint {
namespace detail {

// ---- which places hold which files of a generation, which rank keeps whose copy, and which files have to be
// sent where: every rank computes the same

/// The groups of ranks that share a folder in a host's memory. Places are numbered by their lowest rank.
class PeerPlaces {
 public:
  PeerPlaces() = default;
  /// `identities` are by rank; ranks with equal ones are one place.
  explicit PeerPlaces(const std::vector<std::string>& identities);

  int size() const { return static_cast<int>(ranks_of_.size()); }
  int place_of(int rank) const { return place_of_.at(static_cast<size_t>(rank)); }
  /// Ascending.
  const std::vector<int>& ranks_of(int place) const { return ranks_of_.at(static_cast<size_t>(place)); }
  bool is_leader(int rank) const { return ranks_of(place_of(rank)).front() == rank; }
  /// The rank of the next place that keeps a copy of `rank`'s file (the ranks there take turns); -1 where
  /// there is only one place.
  int copy_target(int rank) const;
  /// The ranks whose copies `rank` keeps, ascending.
  std::vector<int> copy_sources(int rank) const;

 private:
  std::vector<int> place_of_;
  std::vector<std::vector<int>> ranks_of_;
};

/// Equal for two processes that see the same folder, different for folders of different hosts and containers.
std::string place_identity(const std::filesystem::path& folder);

/// The files of a generation at one place.
struct HeldGeneration {
  int64_t step = 0;
  std::string digest;  ///< the manifest's: it distinguishes generations of the same step
  int64_t num_files = 0;
  std::vector<int64_t> ranks;  ///< the ranks whose files are there, with the size in the manifest
  static void fields(auto& wire, auto& self) { wire(self.step, self.digest, self.num_files, self.ranks); }
};

/// The generations in a folder whose manifest is valid, with their files of the right size. Adds a line to
/// `problems` for every other generation and file.
std::vector<HeldGeneration> held_generations(const std::filesystem::path& folder,
                                             std::vector<std::string>& problems);

struct ChosenGeneration {
  int64_t step = 0;
  std::string digest;
  std::vector<std::vector<int>> holders;  ///< by file: the places, ascending
  std::vector<bool> has_manifest;         ///< by place

  /// Whether every file is at some place.
  bool is_whole() const;
};

/// The newest whole generation. `held` is by place.
std::optional<ChosenGeneration> newest_generation(const std::vector<std::vector<HeldGeneration>>& held);

struct FileMove {
  int64_t file = 0;
  int from = 0, to = 0;  ///< ranks
  friend bool operator==(const FileMove&, const FileMove&) = default;
};

/// The files to send so that each place has all that its ranks need. A file is sent to a place once, to the
/// first rank there that needs it. Its holders take turns sending. `wanted` is by rank.
std::vector<FileMove> moves_for(const std::vector<std::set<int64_t>>& wanted,
                                const std::vector<std::vector<int>>& holders, const PeerPlaces& places);

}  // namespace detail

/// The job's folder in this host's memory.
class PeerFolder {
 public:
  struct Options {
    std::filesystem::path parent = "/dev/shm";
    std::string job;  ///< the same after a restart of the job's ranks, and different for every other job
    std::string run;  ///< another run of the same job doesn't load these generations
    /// The folder on disk where the run saves. Folders that earlier jobs of the run left in memory are
    /// removed if those jobs saved there too.
    std::string owner = {};
    /// Where end_peer_folders() saves a generation. Empty: it doesn't save one.
    std::filesystem::path disk = {};
  };

  /// Makes the folder, or opens the one that the ranks had before a restart; removes folders that earlier
  /// jobs of the same run left. Collective over the world, like all calls but the getters. Throws ConfigError
  /// on all ranks if one can't have such a folder, or if two hosts share one.
  PeerFolder(const dist::World& world, Options options);
  PeerFolder(const PeerFolder&) = delete;
  PeerFolder& operator=(const PeerFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  int num_places() const { return places_.size(); }
  /// The rank that keeps a copy of this rank's file; -1: none does.
  int copy_target() const { return places_.copy_target(world_.rank()); }
  /// The ranks whose files this rank keeps copies of.
  std::vector<int> copy_sources() const { return places_.copy_sources(world_.rank()); }
  /// Whether this rank acts for its place.
  bool is_leader() const { return places_.is_leader(world_.rank()); }

  /// The step of the newest generation of which every file exists. Afterwards each place has its manifest,
  /// and no other generation.
  std::optional<int64_t> choose_newest();
  /// Sends files of the chosen generation to the places that read them. For LoadOptions::bring_files.
  void bring_files(const Manifest& manifest, const std::set<int64_t>& ranks);
  struct Damage {
    std::vector<std::string> found;  ///< a line for each file, with rank, host and path
    bool is_whole = true;            ///< an undamaged copy of every file is left at some place
  };
  /// Compares every byte of the chosen generation's files, at all places, with its checksum, and removes
  /// damaged files. If it is still whole afterwards, bring_files sends the undamaged copies. Throws Error on
  /// all ranks if files can't be read at all.
  Damage remove_damaged();
  /// Removes all generations, at all places, because the run continues from another state.
  void forget();
  /// Removes the folder, because the job has ended.
  void remove();

  /// The memory that two generations with their copies and the staged copy take at the place that needs the
  /// most, and the memory that is available.
  struct Memory {
    int64_t files_bytes = 0;   ///< in the folder
    int64_t staged_bytes = 0;  ///< in the processes
    int64_t free_bytes = 0;    ///< for files, including the bytes of existing generations
    bool in_memory = true;     ///< false: the folder is on a disk of the host
  };
  /// Throws ConfigError on all ranks if a place has too little.
  Memory check_memory(const SaveSize& own);

 private:
  std::vector<std::string> problems_of_all(const std::function<void()>& own) const;
  /// Collective: if `own` throws on any rank, all ranks throw Error.
  void on_all(const std::function<void()>& own) const;
  /// The same with ConfigError.
  void require_on_all(const std::function<void()>& own) const;
  /// Collective: returns the texts of the places' leaders, by place; other ranks' texts are ignored.
  std::vector<std::string> gather(const std::string& own) const;
  void check_place(const std::string& identity) const;
  void remove_generations(std::optional<int64_t> except) const;
  void take_manifest();
  /// Checks this rank's share of its place's files and removes damaged ones. Returns the damage by file.
  std::map<int64_t, std::string> remove_own_damaged() const;

  dist::World world_;
  Options options_;
  std::shared_ptr<dist::Group> group_;
  std::filesystem::path path_;
  std::vector<std::string> hosts_;
  detail::PeerPlaces places_;
  std::optional<FolderLock> lock_;  // the leader's
  std::string run_id_;              // in the names of folders that are being removed
  std::optional<detail::ChosenGeneration> chosen_;
};

/// A state that was only in memory when its job ended.
struct LeftState {
  int64_t step = 0;
  std::filesystem::path memory;     ///< the generation's folder
  std::filesystem::path disk = {};  ///< the step's folder that it is copied to
  std::string problem = {};         ///< why it couldn't be copied, and stays in memory; empty: it is on disk
};

/// For the launcher of a job that ends while none of its ranks is running: removes the folders that the job
/// has in `parent`, whichever run they belong to. A generation newer than all complete steps on the run's
/// disk is copied there first, if this host has all its files. `gives_up` is polled every few MiB, and
/// returns true to stop copying. Doesn't throw.
std::vector<LeftState> end_peer_folders(const std::filesystem::path& parent, const std::string& job,
                                        const std::function<bool()>& gives_up = {});

}  // namespace titan::checkpoint
