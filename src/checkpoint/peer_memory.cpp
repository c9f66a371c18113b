// PeerFolder: what generations take at each place, and what there is for them.

#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>

#include <cerrno>
#include <fstream>
#include <limits>

#include "errno_text.h"
#include "peer_folder_impl.h"
#include "titan/core/error.h"
#include "wire.h"

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

int64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("MemAvailable:")) return std::stoll(line.substr(13)) * 1024;
  return std::numeric_limits<int64_t>::max();
}

int64_t free_space(const fs::path& folder) {
  struct statvfs status = {};
  if (::statvfs(folder.c_str(), &status) != 0)
    throw Error(titan::str("cannot look at ", folder.string(), ": ", errno_text(errno)));
  return static_cast<int64_t>(status.f_bavail) * static_cast<int64_t>(status.f_frsize);
}

std::string in_gigabytes(int64_t bytes) {
  return titan::str(static_cast<double>(bytes / 1'000'000) / 1e3, " GB");
}

// Of all ranks.
std::vector<SaveSize> gathered(dist::Group& group, const SaveSize& own) {
  detail::WireWriter out;
  out.number(own.file_bytes);
  out.number(own.staged_bytes);
  std::vector<SaveSize> sizes;
  for (const std::string& text : group.all_gather_text(out.take(), kMemoryLabel)) {
    detail::WireReader in(text);
    const int64_t file_bytes = in.number();
    sizes.push_back({file_bytes, in.number()});
  }
  return sizes;
}

PeerFolder::Memory need_of(int place, const detail::PeerPlaces& places, const std::vector<SaveSize>& sizes) {
  PeerFolder::Memory need;
  const auto add_files = [&](int rank) {
    need.files_bytes += 2 * sizes[static_cast<size_t>(rank)].file_bytes;
  };
  for (const int rank : places.ranks_of(place)) {
    need.staged_bytes += sizes[static_cast<size_t>(rank)].staged_bytes;
    add_files(rank);
    for (const int source : places.copy_sources(rank)) add_files(source);
  }
  return need;
}

void check_enough(const PeerFolder::Memory& need, const fs::path& path, int64_t available) {
  if (need.files_bytes > need.free_bytes)
    throw Error(titan::str("two generations take ", in_gigabytes(need.files_bytes), " in ", path.string(),
                           ", which has ", in_gigabytes(need.free_bytes),
                           " for them: take another checkpoint.peer_folder, or give that one more"));
  if (need.in_memory && need.files_bytes + need.staged_bytes > available)
    throw Error(titan::str("two generations take ", in_gigabytes(need.files_bytes),
                           ", and the copies that are being made ", in_gigabytes(need.staged_bytes),
                           " of host memory, of which ", in_gigabytes(available),
                           " are free: free some, or set checkpoint.peer_interval = 0"));
}

}  // namespace

PeerFolder::Memory PeerFolder::check_memory(const SaveSize& own) {
  const auto sizes = gathered(*impl_->group, own);
  Memory most;
  for (int place = 0; place < num_places(); ++place) {
    const Memory need = need_of(place, impl_->places, sizes);
    if (need.files_bytes > most.files_bytes) most = need;
  }
  impl_->require_on_all([&] {
    Memory here = need_of(impl_->places.place_of(impl_->world.rank()), impl_->places, sizes);
    const int64_t held = bytes_in(path());
    here.in_memory = most.in_memory = is_memory(path());
    here.free_bytes = most.free_bytes = free_space(path()) + held;
    if (is_leader()) check_enough(here, path(), available_memory() + held);
  });
  return most;
}

}  // namespace titan::checkpoint
