#include "checkpoint/peer/generations.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>

#include "checkpoint/format/stored_files.h"
#include "checkpoint/save/rank_tree.h"
#include "core/durable.h"
#include "core/file.h"
#include "titan/checkpoint/manifest.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

namespace fs = std::filesystem;

// Most files of a generation are at other places.
std::vector<int64_t> files_in(const fs::path& folder, const Manifest& manifest,
                              std::vector<std::string>& problems) {
  std::vector<int64_t> ranks;
  for (size_t rank = 0; rank < manifest.files.size(); ++rank) {
    const fs::path file = folder / file_name(static_cast<int64_t>(rank));
    const Storage::Status found = storage_of(file).status(file);
    if (found.kind != Storage::Kind::File) continue;
    if (found.num_bytes == manifest.files[rank].num_bytes)
      ranks.push_back(static_cast<int64_t>(rank));
    else
      problems.push_back(titan::str(file.string(), " has ", found.num_bytes, " bytes instead of ",
                                    manifest.files[rank].num_bytes));
  }
  return ranks;
}

// Takes turns without counting who sends how much.
int sender_of(int64_t file, int to_place, const std::vector<int>& holders, const PeerPlaces& places) {
  const auto turn = static_cast<size_t>(file + to_place);
  const std::vector<int>& ranks = places.ranks_of(holders[turn % holders.size()]);
  return ranks[static_cast<size_t>(file) % ranks.size()];
}

template <class Wire>
void fields(Wire& wire, auto& generation) {
  wire(generation.step, generation.digest, generation.num_files, generation.ranks);
}

}  // namespace

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
std::string place_identity(const fs::path& folder) {
  struct stat status = {};
  if (::stat(folder.c_str(), &status) != 0)
    throw Error(titan::str("cannot look at ", folder.string(), ": ", titan::detail::errno_text(errno)));
  std::string boot;
  try {
    boot = read_file("/proc/sys/kernel/random/boot_id");
  } catch (const Error&) {  // hidden in some containers; then the host's name has to do
  }
  return titan::str(own_host(), " ", boot, " ", status.st_dev, " ", status.st_ino);
}

std::string to_bytes(const std::vector<HeldGeneration>& held) {
  WireWriter out;
  for (const HeldGeneration& generation : held) fields(out, generation);
  return out.take();
}

std::vector<HeldGeneration> parse_held(const std::string& bytes) {
  std::vector<HeldGeneration> held;
  for (WireReader in(bytes); !in.done();) fields(in, held.emplace_back());
  return held;
}

std::vector<HeldGeneration> held_generations(const fs::path& folder, std::vector<std::string>& problems) {
  std::vector<HeldGeneration> held;
  for (const StepEntry& entry : list_steps(folder)) {
    try {
      const Manifest manifest = read_manifest(entry.path);
      TITAN_CHECK(manifest.step == entry.step, entry.path.string(), " is of step ", manifest.step);
      held.push_back({entry.step, digest_of(to_text(manifest)), static_cast<int64_t>(manifest.files.size()),
                      files_in(entry.path, manifest, problems)});
    } catch (const Error& error) {
      problems.push_back(error.what());
    }
  }
  return held;
}

bool ChosenGeneration::is_whole() const {
  return std::none_of(holders.begin(), holders.end(), [](const auto& places) { return places.empty(); });
}

std::optional<ChosenGeneration> newest_generation(const std::vector<std::vector<HeldGeneration>>& held) {
  std::map<std::pair<int64_t, std::string>, ChosenGeneration> found;
  for (size_t place = 0; place < held.size(); ++place) {
    for (const HeldGeneration& part : held[place]) {
      ChosenGeneration& whole = found[{part.step, part.digest}];
      whole.step = part.step;
      whole.digest = part.digest;
      whole.holders.resize(static_cast<size_t>(part.num_files));
      whole.has_manifest.resize(held.size());
      whole.has_manifest[place] = true;
      for (const int64_t rank : part.ranks)
        whole.holders.at(static_cast<size_t>(rank)).push_back(static_cast<int>(place));
    }
  }
  const auto newest =
      std::find_if(found.rbegin(), found.rend(), [](const auto& entry) { return entry.second.is_whole(); });
  return newest == found.rend() ? std::nullopt : std::optional(newest->second);
}

std::vector<FileMove> moves_for(const std::vector<std::set<int64_t>>& wanted,
                                const std::vector<std::vector<int>>& holders, const PeerPlaces& places) {
  std::vector<FileMove> moves;
  for (int place = 0; place < places.size(); ++place) {
    std::set<int64_t> coming;
    for (const int rank : places.ranks_of(place)) {
      for (const int64_t file : wanted[static_cast<size_t>(rank)]) {
        const std::vector<int>& at = holders.at(static_cast<size_t>(file));
        if (std::find(at.begin(), at.end(), place) != at.end() || !coming.insert(file).second) continue;
        moves.push_back({file, sender_of(file, place, at, places), rank});
      }
    }
  }
  return moves;
}

}  // namespace titan::checkpoint::detail
