// PeerFolder: what generations take at each place, and what there is for them.

#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <algorithm>
#include <cerrno>
#include <optional>

#include "checkpoint/peer/free_memory.h"
#include "checkpoint/peer/peer_folder_impl.h"
#include "checkpoint/save/rank_tree.h"
#include "core/units.h"
#include "core/durable.h"
#include "titan/core/error.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;
using titan::detail::errno_text;

constexpr dist::Label kMemoryLabel{.phase = "checkpoint::peer_memory"};

int64_t bytes_in(const fs::path& folder) {
  int64_t bytes = 0;
  std::error_code ignored;
  for (const auto& entry : fs::recursive_directory_iterator(folder, ignored))
    if (entry.is_regular_file(ignored)) bytes += static_cast<int64_t>(entry.file_size(ignored));
  return bytes;
}

bool is_memory(const fs::path& folder) {
  struct statfs status = {};
  return ::statfs(folder.c_str(), &status) == 0 &&
         (status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC);
}

int64_t free_space(const fs::path& folder) {
  struct statvfs status = {};
  if (::statvfs(folder.c_str(), &status) != 0)
    throw Error(titan::str("cannot look at ", folder.string(), ": ", errno_text(errno)));
  return static_cast<int64_t>(status.f_bavail) * static_cast<int64_t>(status.f_frsize);
}

// What a rank takes, and what there is for it.
struct RankMemory {
  SaveSize size;
  std::vector<detail::MemoryLimit> limits;
};

std::string encode_memory(const RankMemory& memory) {
  detail::WireWriter out;
  out.number(memory.size.file_bytes);
  out.number(memory.size.staged_bytes);
  for (const detail::MemoryLimit& limit : memory.limits) {
    out.text(limit.id);
    out.text(limit.name);
    out.number(limit.free_bytes);
  }
  return out.take();
}

RankMemory decode_memory(const std::string& bytes) {
  detail::WireReader in(bytes);
  RankMemory memory;
  memory.size.file_bytes = in.number();
  memory.size.staged_bytes = in.number();
  while (!in.done()) {
    detail::MemoryLimit& limit = memory.limits.emplace_back();
    limit.id = in.text();
    limit.name = in.text();
    limit.free_bytes = in.number();
  }
  return memory;
}

// By rank.
std::vector<RankMemory> gathered(dist::Group& group, const RankMemory& own) {
  std::vector<RankMemory> all;
  for (const std::string& text : group.all_gather_text(encode_memory(own), kMemoryLabel))
    all.push_back(decode_memory(text));
  return all;
}

// Of the files that a rank writes, those that it receives included.
int64_t file_bytes_of(int rank, const detail::PeerPlaces& places, const std::vector<RankMemory>& ranks) {
  int64_t bytes = ranks[static_cast<size_t>(rank)].size.file_bytes;
  for (const int source : places.copy_sources(rank))
    bytes += ranks[static_cast<size_t>(source)].size.file_bytes;
  return 2 * bytes;
}

PeerFolder::Memory need_of(int place, const detail::PeerPlaces& places,
                           const std::vector<RankMemory>& ranks) {
  PeerFolder::Memory need;
  for (const int rank : places.ranks_of(place)) {
    need.staged_bytes += ranks[static_cast<size_t>(rank)].size.staged_bytes;
    need.files_bytes += file_bytes_of(rank, places, ranks);
  }
  return need;
}

// Ranks of a host may be in one control group or in several.
std::optional<detail::MemoryUse> tightest_of(int place, const detail::PeerPlaces& places,
                                             const std::vector<RankMemory>& ranks) {
  std::vector<detail::MemoryNeed> needs;
  for (const int rank : places.ranks_of(place)) {
    const RankMemory& own = ranks[static_cast<size_t>(rank)];
    needs.push_back({file_bytes_of(rank, places, ranks) + own.size.staged_bytes, own.limits});
  }
  return detail::tightest(needs);
}

void check_folder(const PeerFolder::Memory& need, const fs::path& path) {
  if (need.files_bytes <= need.free_bytes) return;
  throw Error(titan::str("two generations take ", size_text(need.files_bytes), " in ", path.string(),
                         ", which has ", size_text(need.free_bytes),
                         " for them: take another checkpoint.peer_folder, or give that one more"));
}

void check_limit(const detail::MemoryUse& use) {
  if (use.wanted_bytes <= use.limit.free_bytes) return;
  throw Error(titan::str("two generations and the copies that are being made take ",
                         size_text(use.wanted_bytes), " of memory, of which ", use.limit.name, " has ",
                         size_text(use.limit.free_bytes),
                         " left: give it more, or set checkpoint.peer_interval = 0"));
}

}  // namespace

PeerFolder::Memory PeerFolder::check_memory(const SaveSize& own) {
  RankMemory mine{.size = own, .limits = {}};
  int64_t held = 0;
  impl_->require_on_all([&] {
    held = bytes_in(path());
    mine.limits = detail::memory_limits(held);
  });
  const auto ranks = gathered(*impl_->group, mine);
  Memory most;
  for (int place = 0; place < num_places(); ++place) {
    const Memory need = need_of(place, impl_->places, ranks);
    if (need.files_bytes > most.files_bytes) most = need;
  }
  impl_->require_on_all([&] {
    const int place = impl_->places.place_of(impl_->world.rank());
    Memory here = need_of(place, impl_->places, ranks);
    here.free_bytes = most.free_bytes = free_space(path()) + held;
    most.in_memory = is_memory(path());
    if (is_leader()) check_folder(here, path());
    const auto use = most.in_memory ? tightest_of(place, impl_->places, ranks) : std::nullopt;
    if (!use) return;
    if (is_leader()) check_limit(*use);
    most.free_bytes = std::min(most.free_bytes, use->limit.free_bytes);
  });
  return most;
}

}  // namespace titan::checkpoint
