#include "core/memory_limits.h"

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

#include "titan/core/error.h"

namespace titan {
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

std::optional<int64_t> bytes_of_host(const fs::path& meminfo, std::string_view key) {
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
  return str(status.st_dev, ":", status.st_ino);
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
                     .name = str("the control group ", folder.string()),
                     .free_bytes = std::max<int64_t>(0, limit - stays),
                     .all_bytes = limit};
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
  const auto available = bytes_of_host(paths.meminfo, "MemAvailable:"),
             all = bytes_of_host(paths.meminfo, "MemTotal:");
  if (available && all)
    limits.push_back(
        {.id = "host", .name = "this host", .free_bytes = *available + held_bytes, .all_bytes = *all});
  for (const Hierarchy& hierarchy : hierarchies(paths)) add_limits(hierarchy, held_bytes, limits);
  return limits;
}

int64_t usable_memory_bytes(const MemoryPaths& paths) {
  const std::vector<MemoryLimit> limits = memory_limits(/*held_bytes=*/0, paths);
  const auto least = std::ranges::min_element(limits, {}, &MemoryLimit::all_bytes);
  return least == limits.end() ? 0 : least->all_bytes;
}

}  // namespace titan
