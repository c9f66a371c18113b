// PeerFolder: which generation the ranks continue from, and how its files get to where they are read.

#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/format/stored_files.h"
#include "checkpoint/load/open_files.h"
#include "checkpoint/peer/peer_folder.h"
#include "checkpoint/peer/transfer.h"
#include "checkpoint/save/rank_tree.h"
#include "checkpoint/save/shared_folder.h"
#include "core/file.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr dist::Label kPeerLoadLabel{.phase = "checkpoint::peer_load"};

template <class Value>
std::string encoded(const Value& value) {
  detail::WireWriter out;
  out(value);
  return out.take();
}

// Removed, so that a later start doesn't count on it either. Throws Error where the file exists but can't be
// opened: that says nothing about its contents.
std::string remove_if_damaged(const fs::path& folder, const Manifest& manifest, int64_t file) {
  const fs::path path = folder / file_name(file);
  if (fs::exists(path)) const detail::InputFile opened(path);
  try {
    detail::open_rank_file(folder, manifest, file).verify();
    return "";
  } catch (const Error& error) {
    detail::remove_quietly(path);
    return error.what();
  }
}

bool is_at(const std::vector<int>& places, int place) {
  return std::find(places.begin(), places.end(), place) != places.end();
}

}  // namespace

std::optional<int64_t> PeerFolder::choose_newest() {
  std::vector<std::string> problems;
  std::string own;
  on_all([&] {
    if (is_leader()) own = detail::to_bytes(detail::held_generations(path_, problems));
  });
  for (const std::string& problem : problems) log::warning("peer checkpoints: passed over: " + problem);
  std::vector<std::vector<detail::HeldGeneration>> held;
  for (const std::string& text : gather(own)) held.push_back(detail::parse_held(text));
  chosen_ = detail::newest_generation(held);
  const auto place = static_cast<size_t>(places_.place_of(world_.rank()));
  // A host that was away may have another generation of the same step.
  const bool has_it = chosen_ && chosen_->has_manifest[place];
  on_all([&] { remove_generations(has_it ? std::optional(chosen_->step) : std::nullopt); });
  if (!chosen_) return std::nullopt;
  take_manifest();
  return chosen_->step;
}

// Places without the manifest get it from the first one that has it.
void PeerFolder::take_manifest() {
  const std::vector<bool>& has = chosen_->has_manifest;
  const auto first = static_cast<int>(std::find(has.begin(), has.end(), true) - has.begin());
  if (std::find(has.begin(), has.end(), false) == has.end()) return;
  const fs::path folder = step_path(path_, chosen_->step);
  const int place = places_.place_of(world_.rank());
  std::string text;
  on_all([&] {
    if (is_leader() && place == first) text = read_file(folder / kManifestName);
  });
  text = gather(text)[static_cast<size_t>(first)];
  on_all([&] {
    if (!is_leader() || has[static_cast<size_t>(place)]) return;
    make_folder(folder);
    write_file_atomic(folder / kManifestName, text);
  });
}

void PeerFolder::bring_files(const Manifest& manifest, const std::set<int64_t>& ranks) {
  TITAN_CHECK(chosen_ && chosen_->step == manifest.step, "peer checkpoints: files of step ", manifest.step,
              " are requested, but that generation wasn't chosen");
  const int place = places_.place_of(world_.rank());
  std::set<int64_t> missing = ranks;
  std::erase_if(missing,
                [&](int64_t file) { return is_at(chosen_->holders.at(static_cast<size_t>(file)), place); });
  std::vector<std::set<int64_t>> wanted;
  for (const std::string& text : group_->all_gather_text(encoded(missing), kPeerLoadLabel))
    wanted.push_back(detail::WireReader(text).get<std::set<int64_t>>());
  const auto moves = detail::moves_for(wanted, chosen_->holders, places_);
  const fs::path folder = step_path(path_, manifest.step);
  int64_t num_bytes = 0;
  on_all([&] {
    std::string problem;
    // In one order on all ranks, so that no two wait for each other; moves between other pairs run at the
    // same time.
    for (const detail::FileMove& move : moves) {
      const int64_t file_bytes = manifest.files.at(static_cast<size_t>(move.file)).num_bytes;
      num_bytes += file_bytes;
      const bool sends = move.from == world_.rank();
      if (!sends && move.to != world_.rank()) continue;
      const auto text = detail::transfer_files(*group_, {{.path = folder / file_name(move.file),
                                                          .num_bytes = file_bytes,
                                                          .peer = sends ? move.to : move.from,
                                                          .sends = sends}});
      if (problem.empty()) problem = text;
    }
    TITAN_CHECK(problem.empty(), problem);
  });
  for (const detail::FileMove& move : moves)
    chosen_->holders[static_cast<size_t>(move.file)].push_back(places_.place_of(move.to));
  if (!moves.empty())
    log::info_rank0(titan::str("peer checkpoints: ", moves.size(), " file(s) of step ", manifest.step, ", ",
                               static_cast<double>(num_bytes) * 1e-9, " GB, came from other hosts' memory"));
}

// The ranks of a place share the work on its files.
std::map<int64_t, std::string> PeerFolder::remove_own_damaged() const {
  const fs::path folder = step_path(path_, chosen_->step);
  const Manifest manifest = read_manifest(folder);
  const int place = places_.place_of(world_.rank());
  const std::vector<int>& ranks = places_.ranks_of(place);
  std::map<int64_t, std::string> damage;
  size_t turn = 0;
  for (size_t file = 0; file < chosen_->holders.size(); ++file) {
    if (!is_at(chosen_->holders[file], place) || ranks[turn++ % ranks.size()] != world_.rank()) continue;
    const auto number = static_cast<int64_t>(file);
    const std::string what = remove_if_damaged(folder, manifest, number);
    if (!what.empty()) damage[number] = what;
  }
  return damage;
}

PeerFolder::Damage PeerFolder::remove_damaged() {
  TITAN_CHECK(chosen_, "peer checkpoints: no generation was chosen whose files could be checked");
  std::map<int64_t, std::string> own;
  on_all([&] { own = remove_own_damaged(); });
  detail::WireWriter out;
  for (const auto& [file, what] : own) out(file, what);
  const auto all = group_->all_gather_text(out.take(), kPeerLoadLabel);
  Damage damage;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (detail::WireReader in(all[rank]); !in.done();) {
      std::erase(chosen_->holders.at(in.get<size_t>()), places_.place_of(static_cast<int>(rank)));
      damage.found.push_back(titan::str(detail::rank_on(rank, hosts_[rank]), ": ", in.get<std::string>()));
    }
  }
  damage.is_whole = chosen_->is_whole();
  return damage;
}

}  // namespace titan::checkpoint
