#pragma once

// [Note: free memory]
// What a process may still take isn't what its host has: each control group that it is in (a container's, a
// SLURM job's and step's) may have a limit of its own, at which the kernel ends processes of the group. Files
// in memory (tmpfs) count to the group whose process wrote them, as its own memory does.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace titan::checkpoint::detail {

/// Where the kernel tells; tests make up theirs.
struct MemoryPaths {
  std::filesystem::path meminfo = "/proc/meminfo";
  std::filesystem::path groups = "/proc/self/cgroup";
  std::filesystem::path mounts = "/proc/self/mountinfo";
};

/// What the host, or a control group, has left.
struct MemoryLimit {
  std::string id;  ///< the same for all processes that share it
  std::string name;
  int64_t free_bytes = 0;
};

/// This process's: the host's, and of its control groups (version 1 and 2) and all above them those that have
/// a limit. What can't be read limits nothing. `held_bytes`: of files in memory that will make way. Page
/// cache of other files counts as free: the kernel gives it up first.
std::vector<MemoryLimit> memory_limits(int64_t held_bytes, const MemoryPaths& paths = {});

/// What a process will take, and what limits it.
struct MemoryNeed {
  int64_t bytes = 0;
  std::vector<MemoryLimit> limits;
};

struct MemoryUse {
  MemoryLimit limit;
  int64_t wanted_bytes = 0;  ///< by all that it limits together
};

/// Of the limits of processes of one host, the one that has least left when all have taken theirs; nothing
/// where there is none. What is free is as the process saw it that saw least.
std::optional<MemoryUse> tightest(const std::vector<MemoryNeed>& needs);

}  // namespace titan::checkpoint::detail
