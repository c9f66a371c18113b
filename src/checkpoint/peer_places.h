#pragma once

// Which ranks share a folder of a host's memory, and who keeps whose copy.

#include <filesystem>
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

}  // namespace titan::checkpoint::detail
