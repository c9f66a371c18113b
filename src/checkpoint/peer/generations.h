#pragma once

// Which hosts hold which files of which generation, who keeps whose copy, and which files have to be sent
// where: arithmetic, the same on all ranks. The nouns are in peer_folder.h.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace titan::checkpoint::detail {

/// Which ranks share a folder of a host's memory. Places are numbered by their lowest rank.
class PeerPlaces {
 public:
  PeerPlaces() = default;
  /// `identities`: by rank; equal ones are one place.
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
  std::string digest;  ///< of the manifest: tells different generations of one step apart
  int64_t num_files = 0;
  std::vector<int64_t> ranks;  ///< whose files are there, in the size that the manifest records
  static void fields(auto& wire, auto& self) { wire(self.step, self.digest, self.num_files, self.ranks); }
};

/// The generations in a folder whose manifest is valid, with their files of the right size; a line in
/// `problems` for every other one.
std::vector<HeldGeneration> held_generations(const std::filesystem::path& folder,
                                             std::vector<std::string>& problems);

struct ChosenGeneration {
  int64_t step = 0;
  std::string digest;
  std::vector<std::vector<int>> holders;  ///< by file: the places, ascending
  std::vector<bool> has_manifest;         ///< by place

  /// Every file is at some place.
  bool is_whole() const;
};

/// The newest whole generation. `held`: by place.
std::optional<ChosenGeneration> newest_generation(const std::vector<std::vector<HeldGeneration>>& held);

struct FileMove {
  int64_t file = 0;
  int from = 0, to = 0;  ///< ranks
  friend bool operator==(const FileMove&, const FileMove&) = default;
};

/// The moves that bring to each place the files that its ranks want and that it lacks, each once, received by
/// the first rank there that wants it; its holders, and the ranks there, take turns sending. `wanted`: by
/// rank.
std::vector<FileMove> moves_for(const std::vector<std::set<int64_t>>& wanted,
                                const std::vector<std::vector<int>>& holders, const PeerPlaces& places);

}  // namespace titan::checkpoint::detail
