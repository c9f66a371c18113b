#include "checkpoint/peer/free_memory.h"

#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>

#include "checkpoint/peer/peer_folder.h"
#include "checkpoint/save/rank_tree.h"
#include "core/durable.h"
#include "core/process.h"
#include "core/units.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {

std::optional<MemoryUse> tightest(const std::vector<MemoryNeed>& needs) {
  std::map<std::string, MemoryUse> uses;
  for (const MemoryNeed& need : needs) {
    for (const MemoryLimit& limit : need.limits) {
      MemoryUse& use = uses.emplace(limit.id, MemoryUse{limit, 0}).first->second;
      use.limit.free_bytes = std::min(use.limit.free_bytes, limit.free_bytes);
      use.wanted_bytes += need.bytes;
    }
  }
  const auto left = [](const auto& use) { return use.second.limit.free_bytes - use.second.wanted_bytes; };
  const auto least = std::min_element(uses.begin(), uses.end(),
                                      [&](const auto& a, const auto& b) { return left(a) < left(b); });
  return least == uses.end() ? std::nullopt : std::optional(least->second);
}

}  // namespace titan::checkpoint::detail

// ---- PeerFolder::check_memory: the memory that generations take at each place, and the memory available
// there

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;

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
    throw Error(titan::str("cannot stat ", folder.string(), ": ", errno_text(errno)));
  return static_cast<int64_t>(status.f_bavail) * static_cast<int64_t>(status.f_frsize);
}

// The memory that a rank needs, and its limits.
struct RankMemory {
  SaveSize size;
  std::vector<MemoryLimit> limits;
  static void fields(auto& wire, auto& self) {
    wire(self.size.file_bytes, self.size.staged_bytes, self.limits);
  }
};

void check_folder(const PeerFolder::Memory& need, const fs::path& path) {
  if (need.files_bytes <= need.free_bytes) return;
  throw Error(titan::str("two generations take ", size_text(need.files_bytes), " in ", path.string(),
                         ", which has ", size_text(need.free_bytes),
                         " for them: use another checkpoint.peer_folder, or give that one more space"));
}

void check_limit(const detail::MemoryUse& use) {
  if (use.wanted_bytes <= use.limit.free_bytes) return;
  throw Error(titan::str("two generations and the staged copies take ", size_text(use.wanted_bytes),
                         " of memory, of which ", use.limit.name, " has ", size_text(use.limit.free_bytes),
                         " left: give it more, or set checkpoint.peer_interval = 0"));
}

}  // namespace

PeerFolder::Memory PeerFolder::check_memory(const SaveSize& own) {
  RankMemory mine{.size = own, .limits = {}};
  int64_t held = 0;
  require_on_all([&] {
    held = bytes_in(path_);
    mine.limits = memory_limits(held);
  });
  std::vector<RankMemory> ranks;
  for (const std::string& text : group_->all_gather_text(detail::to_wire(mine), kMemoryLabel))
    ranks.push_back(detail::from_wire<RankMemory>(text));
  // The bytes of the files that a rank writes, including those that it receives, in two generations.
  const auto file_bytes_of = [&](int rank) {
    int64_t bytes = ranks[static_cast<size_t>(rank)].size.file_bytes;
    for (const int source : places_.copy_sources(rank))
      bytes += ranks[static_cast<size_t>(source)].size.file_bytes;
    return 2 * bytes;
  };
  const auto need_of = [&](int place) {
    Memory need;
    for (const int rank : places_.ranks_of(place)) {
      need.staged_bytes += ranks[static_cast<size_t>(rank)].size.staged_bytes;
      need.files_bytes += file_bytes_of(rank);
    }
    return need;
  };
  Memory most;
  for (int place = 0; place < num_places(); ++place) {
    const Memory need = need_of(place);
    if (need.files_bytes > most.files_bytes) most = need;
  }
  require_on_all([&] {
    const int place = places_.place_of(world_.rank());
    Memory here = need_of(place);
    here.free_bytes = most.free_bytes = free_space(path_) + held;
    most.in_memory = is_memory(path_);
    if (is_leader()) check_folder(here, path_);
    if (!most.in_memory) return;
    // The ranks of a host may be in one control group or in several.
    std::vector<detail::MemoryNeed> needs;
    for (const int rank : places_.ranks_of(place)) {
      const RankMemory& memory = ranks[static_cast<size_t>(rank)];
      needs.push_back({file_bytes_of(rank) + memory.size.staged_bytes, memory.limits});
    }
    const auto use = detail::tightest(needs);
    if (!use) return;
    if (is_leader()) check_limit(*use);
    most.free_bytes = std::min(most.free_bytes, use->limit.free_bytes);
  });
  return most;
}

}  // namespace titan::checkpoint
