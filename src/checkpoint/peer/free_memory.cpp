#include "checkpoint/peer/free_memory.h"

#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <map>
#include <sstream>
#include <string_view>
#include <utility>

#include "checkpoint/peer/peer_folder.h"
#include "checkpoint/save/rank_tree.h"
#include "core/durable.h"
#include "core/process.h"
#include "core/units.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

namespace fs = std::filesystem;

// The file names of one version of control groups.
struct GroupFiles {
  std::vector<const char*> limits;
  const char* usage;
  std::vector<const char*> page_cache;  // in memory.stat: files that are also on a disk
  const char* shared;                   // in memory.stat: files in memory
};

const GroupFiles kVersion1 = {{"memory.limit_in_bytes"},
                              "memory.usage_in_bytes",
                              {"total_inactive_file", "total_active_file"},
                              "total_shmem"};
// Above memory.high the kernel throttles processes until they stall, because files in memory can't be given
// up.
const GroupFiles kVersion2 = {
    {"memory.max", "memory.high"}, "memory.current", {"inactive_file", "active_file"}, "shmem"};

struct Mount {
  std::string root;  // the part of the hierarchy that is mounted
  fs::path point;
};

// A hierarchy of control groups that limits memory.
struct Hierarchy {
  const GroupFiles* files;
  std::string path;  // this process's group
  std::vector<Mount> mounts;
};

std::vector<std::string> lines_in(const fs::path& path) {
  std::vector<std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

std::optional<int64_t> number_in(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end != text.data() ? std::optional(value) : std::nullopt;
}

// Returns nothing if the file doesn't exist, or says "max".
std::optional<int64_t> number_of_file(const fs::path& path) {
  const auto lines = lines_in(path);
  return lines.empty() ? std::nullopt : number_in(lines.front());
}

std::optional<int64_t> available_of_host(const fs::path& meminfo) {
  constexpr std::string_view key = "MemAvailable:";
  for (const std::string& line : lines_in(meminfo)) {
    if (!line.starts_with(key)) continue;
    const auto kilobytes = number_in(std::string_view(line).substr(line.find_first_not_of(' ', key.size())));
    return kilobytes ? std::optional(*kilobytes * 1024) : std::nullopt;
  }
  return std::nullopt;
}

// Spaces and backslashes in paths are written as "\040" and "\134".
std::string unescaped(const std::string& text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      plain += static_cast<char>(std::stoi(text.substr(i + 1, 3), nullptr, 8));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

bool is_in_list(const std::string& list, const std::string& word) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

// "36 35 98:0 ROOT POINT rw,noatime shared:1 - TYPE SOURCE OPTIONS"
std::vector<Mount> mounts_of(const fs::path& mounts, const GroupFiles& files) {
  std::vector<Mount> found;
  for (const std::string& line : lines_in(mounts)) {
    std::istringstream before(line), after(line.substr(std::min(line.size(), line.find(" - ") + 3)));
    std::string skipped, root, point, type, source, options;
    before >> skipped >> skipped >> skipped >> root >> point;
    after >> type >> source >> options;
    const bool is_it =
        &files == &kVersion2 ? type == "cgroup2" : type == "cgroup" && is_in_list(options, "memory");
    if (is_it) found.push_back({unescaped(root), fs::path(unescaped(point)).lexically_normal()});
  }
  return found;
}

// "4:memory:/slurm/job_7", or in version 2 "0::/slurm/job_7". Only one of the two limits memory; the folders
// of the other lack the files.
std::vector<Hierarchy> hierarchies(const MemoryPaths& paths) {
  std::vector<Hierarchy> found;
  for (const std::string& line : lines_in(paths.groups)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && !is_in_list(controllers, "memory")) continue;
    const GroupFiles& files = controllers.empty() ? kVersion2 : kVersion1;
    found.push_back({&files, line.substr(second + 1), mounts_of(paths.mounts, files)});
  }
  return found;
}

// A container that sees only its own group's folders may be given the group's path on its host: then the
// mount is the group.
fs::path folder_of(const Hierarchy& hierarchy, const Mount& mount) {
  const std::string root = mount.root == "/" ? "" : mount.root;
  const bool is_below =
      (hierarchy.path + "/").starts_with(root + "/") && hierarchy.path.find("/..") == std::string::npos;
  const fs::path below = is_below ? fs::path(hierarchy.path.substr(root.size())).relative_path() : fs::path();
  const fs::path folder = (mount.point / below).lexically_normal();
  std::error_code ignored;
  return !below.empty() && fs::is_directory(folder, ignored) ? folder : mount.point;
}

std::map<std::string, int64_t> statistics_in(const fs::path& folder) {
  std::map<std::string, int64_t> values;
  for (const std::string& line : lines_in(folder / "memory.stat")) {
    const size_t space = line.find(' ');
    if (space == line.npos) continue;
    if (const auto value = number_in(std::string_view(line).substr(space + 1)))
      values[line.substr(0, space)] = *value;
  }
  return values;
}

std::string identity_of(const fs::path& folder) {
  struct stat status = {};
  if (::stat(folder.c_str(), &status) != 0) return folder.string();
  return titan::str(status.st_dev, ":", status.st_ino);
}

std::optional<MemoryLimit> limit_of(const fs::path& folder, const GroupFiles& files, int64_t held_bytes) {
  constexpr int64_t unlimited = int64_t{1} << 60;  // version 1 reports a larger number
  int64_t limit = unlimited;
  for (const char* name : files.limits)
    limit = std::min(limit, number_of_file(folder / name).value_or(unlimited));
  const auto usage = number_of_file(folder / files.usage);
  if (limit == unlimited || !usage) return std::nullopt;
  auto statistics = statistics_in(folder);
  // Another group may have written the held files.
  int64_t makes_way = std::min(held_bytes, statistics[files.shared]);
  for (const char* name : files.page_cache) makes_way += statistics[name];
  const int64_t stays = std::max<int64_t>(0, *usage - makes_way);
  return MemoryLimit{.id = identity_of(folder),
                     .name = titan::str("the control group ", folder.string()),
                     .free_bytes = std::max<int64_t>(0, limit - stays)};
}

void add_limits(const Hierarchy& hierarchy, int64_t held_bytes, std::vector<MemoryLimit>& limits) {
  const auto is_known = [&](const std::string& id) {
    return std::any_of(limits.begin(), limits.end(), [&](const auto& limit) { return limit.id == id; });
  };
  for (const Mount& mount : hierarchy.mounts) {
    for (fs::path folder = folder_of(hierarchy, mount);; folder = folder.parent_path()) {
      auto limit = limit_of(folder, *hierarchy.files, held_bytes);
      // A hierarchy may be mounted twice.
      if (limit && !is_known(limit->id)) limits.push_back(std::move(*limit));
      if (folder == mount.point || !folder.has_relative_path()) break;
    }
  }
}

}  // namespace

std::vector<MemoryLimit> memory_limits(int64_t held_bytes, const MemoryPaths& paths) {
  std::vector<MemoryLimit> limits;
  if (const auto available = available_of_host(paths.meminfo))
    limits.push_back({.id = "host", .name = "this host", .free_bytes = *available + held_bytes});
  for (const Hierarchy& hierarchy : hierarchies(paths)) add_limits(hierarchy, held_bytes, limits);
  return limits;
}

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
  std::vector<detail::MemoryLimit> limits;
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
    mine.limits = detail::memory_limits(held);
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
