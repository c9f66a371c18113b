#pragma once

// What a PeerFolder holds. Made and removed in peer_folder.cpp; its generations are found in
// peer_loading.cpp.

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/peer/generations.h"
#include "checkpoint/peer/peer_folder.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/dist/collectives.h"

namespace titan::checkpoint {

struct PeerFolder::Impl {
  Impl(const dist::World& world, Options options);

  /// Collective: what `own` throws on any rank all ranks throw, with the ranks, as Error ...
  void on_all(const std::function<void()>& own) const;
  /// ... and as ConfigError.
  void require_on_all(const std::function<void()>& own) const;
  /// Of the places' leaders; the others say nothing.
  std::vector<std::string> gather(const std::string& own) const;
  bool is_leader() const { return places.is_leader(world.rank()); }
  void remove_generations(std::optional<int64_t> but) const;
  void take_manifest();
  /// What is wrong with the files of this rank's part of its place's, by number; those are removed.
  std::map<int64_t, std::string> remove_own_damaged() const;

  dist::World world;
  Options options;
  std::shared_ptr<dist::Group> group;
  std::filesystem::path path;
  std::vector<std::string> hosts;
  detail::PeerPlaces places;
  std::optional<FolderLock> lock;  // the leader's
  std::string run_id;              // of names that are being removed
  std::optional<detail::ChosenGeneration> chosen;

 private:
  std::vector<std::string> problems_of_all(const std::function<void()>& own) const;
  void open();
  void check_place(const std::string& identity) const;
};

}  // namespace titan::checkpoint

namespace titan::checkpoint::detail {

// A generation as a step on disk, when no rank is there any more that could save it. It is of the same files,
// so it only has to be copied.

/// In a peer folder: the path of the folder that its run saves in.
inline constexpr const char* kDiskName = ".disk";

/// Copies the newest generation of which this place has all files to the run's disk, with every checksum
/// compared, unless a complete step there is as new; then, and where there is no generation, nullopt. Throws
/// Error where `folder` can't be read; all else is in the state's problem, and has left the disk as it was.
std::optional<LeftState> save_newest_generation(const std::filesystem::path& folder,
                                                const std::function<bool()>& gives_up);

}  // namespace titan::checkpoint::detail
