// PeerFolder: which generation the ranks go on from, and how its files come to where they are read.

#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/format/input_file.h"
#include "checkpoint/load/open_files.h"
#include "checkpoint/peer/peer_folder_impl.h"
#include "checkpoint/peer/transfer.h"
#include "checkpoint/save/rank_tree.h"
#include "titan/core/error.h"
#include "titan/core/file.h"
#include "titan/core/log.h"

namespace titan::checkpoint {
namespace {

constexpr dist::Label kPeerLoadLabel{.phase = "checkpoint::peer_load"};

std::string encode_files(const std::set<int64_t>& files) {
  detail::WireWriter out;
  for (const int64_t file : files) out.number(file);
  return out.take();
}

std::set<int64_t> decode_files(const std::string& bytes) {
  std::set<int64_t> files;
  for (detail::WireReader in(bytes); !in.done();) files.insert(in.number());
  return files;
}

std::string encode_damage(const std::map<int64_t, std::string>& damage) {
  detail::WireWriter out;
  for (const auto& [file, what] : damage) {
    out.number(file);
    out.text(what);
  }
  return out.take();
}

// Removed, it isn't counted on by a later start either. Throws Error where it is there but can't be opened:
// that says nothing of what it holds.
std::string remove_if_damaged(const std::filesystem::path& folder, const Manifest& manifest, int64_t file) {
  if (const auto path = folder / file_name(file); std::filesystem::exists(path))
    const detail::InputFile opened(path);
  try {
    detail::open_rank_file(folder, manifest, file).verify();
    return "";
  } catch (const Error& error) {
    std::error_code ignored;
    std::filesystem::remove(folder / file_name(file), ignored);
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
  impl_->on_all([&] {
    if (impl_->is_leader()) own = detail::to_bytes(detail::held_generations(impl_->path, problems));
  });
  for (const std::string& problem : problems) log::warning("peer checkpoints: passed over: " + problem);
  std::vector<std::vector<detail::HeldGeneration>> held;
  for (const std::string& text : impl_->gather(own)) held.push_back(detail::parse_held(text));
  impl_->chosen = detail::newest_generation(held);
  const auto place = static_cast<size_t>(impl_->places.place_of(impl_->world.rank()));
  // Of the same step there may be another generation here, of a host that was away.
  const bool has_it = impl_->chosen && impl_->chosen->has_manifest[place];
  impl_->on_all(
      [&] { impl_->remove_generations(has_it ? std::optional(impl_->chosen->step) : std::nullopt); });
  if (!impl_->chosen) return std::nullopt;
  impl_->take_manifest();
  return impl_->chosen->step;
}

// To places that have none, from the first that has it.
void PeerFolder::Impl::take_manifest() {
  const std::vector<bool>& has = chosen->has_manifest;
  const auto first = static_cast<int>(std::find(has.begin(), has.end(), true) - has.begin());
  if (std::find(has.begin(), has.end(), false) == has.end()) return;
  const std::filesystem::path folder = step_path(path, chosen->step);
  const int place = places.place_of(world.rank());
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
  Impl& impl = *impl_;
  TITAN_CHECK(impl.chosen && impl.chosen->step == manifest.step, "peer checkpoints: files of step ",
              manifest.step, " are brought, which wasn't chosen");
  const int place = impl.places.place_of(impl.world.rank());
  std::set<int64_t> missing = ranks;
  std::erase_if(missing, [&](int64_t file) {
    return is_at(impl.chosen->holders.at(static_cast<size_t>(file)), place);
  });
  std::vector<std::set<int64_t>> wanted;
  for (const std::string& text : impl.group->all_gather_text(encode_files(missing), kPeerLoadLabel))
    wanted.push_back(decode_files(text));
  const auto moves = detail::moves_for(wanted, impl.chosen->holders, impl.places);
  const std::filesystem::path folder = step_path(impl.path, manifest.step);
  int64_t num_bytes = 0;
  impl.on_all([&] {
    std::string problem;
    // In one order on all ranks, so that no two wait for each other; those of other pairs run beside.
    for (const detail::FileMove& move : moves) {
      num_bytes += manifest.files.at(static_cast<size_t>(move.file)).num_bytes;
      const bool sends = move.from == impl.world.rank();
      if (!sends && move.to != impl.world.rank()) continue;
      const auto text = detail::transfer_files(
          *impl.group, {{.path = folder / file_name(move.file),
                         .num_bytes = manifest.files[static_cast<size_t>(move.file)].num_bytes,
                         .peer = sends ? move.to : move.from,
                         .sends = sends}});
      if (problem.empty()) problem = text;
    }
    TITAN_CHECK(problem.empty(), problem);
  });
  for (const detail::FileMove& move : moves)
    impl.chosen->holders[static_cast<size_t>(move.file)].push_back(impl.places.place_of(move.to));
  if (!moves.empty())
    log::info_rank0(titan::str("peer checkpoints: ", moves.size(), " file(s) of step ", manifest.step, ", ",
                               static_cast<double>(num_bytes) * 1e-9, " GB, came from other hosts' memory"));
}

// The ranks of a place share its files.
std::map<int64_t, std::string> PeerFolder::Impl::remove_own_damaged() const {
  const std::filesystem::path folder = step_path(path, chosen->step);
  const Manifest manifest = read_manifest(folder);
  const int place = places.place_of(world.rank());
  const std::vector<int>& ranks = places.ranks_of(place);
  std::map<int64_t, std::string> damage;
  size_t turn = 0;
  for (size_t file = 0; file < chosen->holders.size(); ++file) {
    if (!is_at(chosen->holders[file], place) || ranks[turn++ % ranks.size()] != world.rank()) continue;
    const auto number = static_cast<int64_t>(file);
    const std::string what = remove_if_damaged(folder, manifest, number);
    if (!what.empty()) damage[number] = what;
  }
  return damage;
}

PeerFolder::Damage PeerFolder::remove_damaged() {
  TITAN_CHECK(impl_->chosen, "peer checkpoints: files are checked, but no generation was chosen");
  std::map<int64_t, std::string> own;
  impl_->on_all([&] { own = impl_->remove_own_damaged(); });
  const auto all = impl_->group->all_gather_text(encode_damage(own), kPeerLoadLabel);
  Damage damage;
  auto& holders = impl_->chosen->holders;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (detail::WireReader in(all[rank]); !in.done();) {
      const auto file = static_cast<size_t>(in.number());
      std::erase(holders.at(file), impl_->places.place_of(static_cast<int>(rank)));
      damage.found.push_back(titan::str("rank ", rank, " (", impl_->hosts[rank], "): ", in.text()));
    }
  }
  damage.is_whole =
      std::none_of(holders.begin(), holders.end(), [](const auto& places) { return places.empty(); });
  return damage;
}

}  // namespace titan::checkpoint
