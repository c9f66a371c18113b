#pragma once

// Which ranks share a folder of a host's memory, and who keeps whose copy.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace titan::checkpoint::detail {

/// Places are numbered by their lowest rank.
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

  /// The rank of the next place that keeps a copy of `rank`'s file, those there taking turns; -1 where there
  /// is one place.
  int copy_target(int rank) const;
  /// Whose copies `rank` keeps, ascending.
  std::vector<int> copy_sources(int rank) const;

 private:
  std::vector<int> place_of_;
  std::vector<std::vector<int>> ranks_of_;
};

/// Equal for two processes that see the same folder, unequal for folders of different hosts and containers.
std::string place_identity(const std::filesystem::path& folder);

// Which places hold which files of which generation, and from where to where files have to go: arithmetic,
// the same on all ranks.

/// What one place has of a generation.
struct HeldGeneration {
  int64_t step = 0;
  std::string digest;  ///< of the manifest: generations of one step that aren't the same are told apart
  int64_t num_files = 0;
  std::vector<int64_t> ranks;  ///< whose files are there, in the size that the manifest says
};

std::string to_bytes(const std::vector<HeldGeneration>& held);
/// Throws Error.
std::vector<HeldGeneration> parse_held(const std::string& bytes);

/// Those of a folder whose manifest is whole, with their files of the right size; of others a line in
/// `problems`.
std::vector<HeldGeneration> held_generations(const std::filesystem::path& folder,
                                             std::vector<std::string>& problems);

struct ChosenGeneration {
  int64_t step = 0;
  std::string digest;
  std::vector<std::vector<int>> holders;  ///< by file: the places, ascending
  std::vector<bool> has_manifest;         ///< by place
};

/// The newest of which every file is at some place. `held`: by place.
std::optional<ChosenGeneration> newest_generation(const std::vector<std::vector<HeldGeneration>>& held);

struct FileMove {
  int64_t file = 0;
  int from = 0, to = 0;  ///< ranks
  friend bool operator==(const FileMove&, const FileMove&) = default;
};

/// What brings to each place the files that its ranks want and it hasn't got, each once, by the rank there
/// that wants it first; its holders, and the ranks there, take turns. `wanted`: by rank.
std::vector<FileMove> moves_for(const std::vector<std::set<int64_t>>& wanted,
                                const std::vector<std::vector<int>>& holders, const PeerPlaces& places);

}  // namespace titan::checkpoint::detail
