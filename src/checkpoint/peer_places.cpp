#include "peer_places.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <map>

#include "errno_text.h"
#include "shared_folder.h"
#include "titan/core/error.h"
#include "titan/core/file.h"

namespace titan::checkpoint::detail {

PeerPlaces::PeerPlaces(const std::vector<std::string>& identities) {
  std::map<std::string, int> known;
  for (size_t rank = 0; rank < identities.size(); ++rank) {
    const auto [entry, is_new] = known.emplace(identities[rank], size());
    if (is_new) ranks_of_.emplace_back();
    place_of_.push_back(entry->second);
    ranks_of_[static_cast<size_t>(entry->second)].push_back(static_cast<int>(rank));
  }
}

int PeerPlaces::copy_target(int rank) const {
  if (size() < 2) return -1;
  const int place = place_of(rank);
  const std::vector<int>& own = ranks_of(place);
  const std::vector<int>& next = ranks_of((place + 1) % size());
  const auto position = static_cast<size_t>(std::find(own.begin(), own.end(), rank) - own.begin());
  return next[position % next.size()];
}

std::vector<int> PeerPlaces::copy_sources(int rank) const {
  std::vector<int> sources;
  if (size() < 2) return sources;
  for (const int source : ranks_of((place_of(rank) + size() - 1) % size()))
    if (copy_target(source) == rank) sources.push_back(source);
  return sources;
}

// Inodes alone are equal on hosts that boot alike, and hosts may share a name.
std::string place_identity(const std::filesystem::path& folder) {
  struct stat status = {};
  if (::stat(folder.c_str(), &status) != 0)
    throw Error(titan::str("cannot look at ", folder.string(), ": ", titan::detail::errno_text(errno)));
  std::string boot;
  try {
    boot = read_file("/proc/sys/kernel/random/boot_id");
  } catch (const Error&) {  // hidden in some containers; then the name has to do
  }
  return titan::str(own_host(), " ", boot, " ", status.st_dev, " ", status.st_ino);
}

}  // namespace titan::checkpoint::detail
