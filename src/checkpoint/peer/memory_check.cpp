// PeerFolder: what generations take at each place, compared with what is available.

#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <optional>

#include "checkpoint/peer/free_memory.h"
#include "checkpoint/peer/peer_folder.h"
#include "checkpoint/save/rank_tree.h"
#include "core/durable.h"
#include "core/units.h"
#include "titan/core/error.h"

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
    throw Error(titan::str("cannot look at ", folder.string(), ": ", titan::detail::errno_text(errno)));
  return static_cast<int64_t>(status.f_bavail) * static_cast<int64_t>(status.f_frsize);
}

// The memory that a rank needs, and its limits.
struct RankMemory {
  SaveSize size;
  std::vector<detail::MemoryLimit> limits;
};

template <class Wire>
void limit_fields(Wire& wire, auto& limit) {
  wire(limit.id, limit.name, limit.free_bytes);
}

std::string encode_memory(const RankMemory& memory) {
  detail::WireWriter out;
  out(memory.size.file_bytes, memory.size.staged_bytes);
  for (const detail::MemoryLimit& limit : memory.limits) limit_fields(out, limit);
  return out.take();
}

RankMemory decode_memory(const std::string& bytes) {
  detail::WireReader in(bytes);
  RankMemory memory;
  in(memory.size.file_bytes, memory.size.staged_bytes);
  while (!in.done()) limit_fields(in, memory.limits.emplace_back());
  return memory;
}

// The memory that the ranks of a job need, by rank and place.
class Needs {
 public:
  Needs(const detail::PeerPlaces& places, std::vector<RankMemory> ranks)
      : places_(places), ranks_(std::move(ranks)) {}

  PeerFolder::Memory of(int place) const {
    PeerFolder::Memory need;
    for (const int rank : places_.ranks_of(place)) {
      need.staged_bytes += at(rank).size.staged_bytes;
      need.files_bytes += file_bytes_of(rank);
    }
    return need;
  }

  // The ranks of a host may be in one control group or in several.
  std::optional<detail::MemoryUse> tightest_of(int place) const {
    std::vector<detail::MemoryNeed> needs;
    for (const int rank : places_.ranks_of(place))
      needs.push_back({file_bytes_of(rank) + at(rank).size.staged_bytes, at(rank).limits});
    return detail::tightest(needs);
  }

 private:
  const RankMemory& at(int rank) const { return ranks_[static_cast<size_t>(rank)]; }

  // The bytes of the files that a rank writes, including those that it receives, in two generations.
  int64_t file_bytes_of(int rank) const {
    int64_t bytes = at(rank).size.file_bytes;
    for (const int source : places_.copy_sources(rank)) bytes += at(source).size.file_bytes;
    return 2 * bytes;
  }

  const detail::PeerPlaces& places_;
  std::vector<RankMemory> ranks_;
};

void check_folder(const PeerFolder::Memory& need, const fs::path& path) {
  if (need.files_bytes <= need.free_bytes) return;
  throw Error(titan::str("two generations take ", size_text(need.files_bytes), " in ", path.string(),
                         ", which has ", size_text(need.free_bytes),
                         " for them: use another checkpoint.peer_folder, or give that one more"));
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
    mine.limits = detail::memory_limits(held);
  });
  std::vector<RankMemory> ranks;
  for (const std::string& text : group_->all_gather_text(encode_memory(mine), kMemoryLabel))
    ranks.push_back(decode_memory(text));
  const Needs needs(places_, std::move(ranks));
  Memory most;
  for (int place = 0; place < num_places(); ++place) {
    const Memory need = needs.of(place);
    if (need.files_bytes > most.files_bytes) most = need;
  }
  require_on_all([&] {
    const int place = places_.place_of(world_.rank());
    Memory here = needs.of(place);
    here.free_bytes = most.free_bytes = free_space(path_) + held;
    most.in_memory = is_memory(path_);
    if (is_leader()) check_folder(here, path_);
    const auto use = most.in_memory ? needs.tightest_of(place) : std::nullopt;
    if (!use) return;
    if (is_leader()) check_limit(*use);
    most.free_bytes = std::min(most.free_bytes, use->limit.free_bytes);
  });
  return most;
}

}  // namespace titan::checkpoint
