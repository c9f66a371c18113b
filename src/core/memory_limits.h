#pragma once

// [Note: free memory] A process may have less memory available than its host: each control group that it is
// in (a container's, a SLURM job's and step's) may have its own limit, at which the kernel kills processes of
// the group. Files in memory (tmpfs) count towards the group whose process wrote them, like that process's
// own memory.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace titan {

/// The kernel's files; tests use their own.
struct MemoryPaths {
  std::filesystem::path meminfo = "/proc/meminfo";
  std::filesystem::path groups = "/proc/self/cgroup";
  std::filesystem::path mounts = "/proc/self/mountinfo";
};

/// The memory of the host or of a control group.
struct MemoryLimit {
  std::string id;  ///< the same for all processes that share the limit
  std::string name;
  int64_t free_bytes = 0;  ///< not in use
  int64_t all_bytes = 0;
  static void fields(auto& wire, auto& self) { wire(self.id, self.name, self.free_bytes); }
};

/// This process's limits: the host's, and those of its control groups (version 1 and 2) and all groups above
/// them. A limit that can't be read doesn't count. `held_bytes` is the size of files in memory that will be
/// replaced. Page cache of other files counts as free, because the kernel gives it up first.
std::vector<MemoryLimit> memory_limits(int64_t held_bytes, const MemoryPaths& paths = {});

/// The most that this process and those beside it may take: the host's memory, or the least limit of its control groups; 0 if the kernel doesn't
/// say.
int64_t usable_memory_bytes(const MemoryPaths& paths = {});

}  // namespace titan
