#pragma once

// [Note: free memory] A process may have less memory available than its host: each control group that it is
// in (a container's, a SLURM job's and step's) may have its own limit, at which the kernel kills processes of
// the group. Files in memory (tmpfs) count towards the group whose process wrote them, like that process's
// own memory.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace titan::checkpoint::detail {

/// The kernel's files; tests use their own.
struct MemoryPaths {
  std::filesystem::path meminfo = "/proc/meminfo";
  std::filesystem::path groups = "/proc/self/cgroup";
  std::filesystem::path mounts = "/proc/self/mountinfo";
};

/// The memory that the host or a control group has left.
struct MemoryLimit {
  std::string id;  ///< the same for all processes that share the limit
  std::string name;
  int64_t free_bytes = 0;
  static void fields(auto& wire, auto& self) { wire(self.id, self.name, self.free_bytes); }
};

/// This process's limits: the host's, and those of its control groups (version 1 and 2) and all groups above
/// them. A limit that can't be read doesn't count. `held_bytes` is the size of files in memory that will be
/// replaced. Page cache of other files counts as free, because the kernel gives it up first.
std::vector<MemoryLimit> memory_limits(int64_t held_bytes, const MemoryPaths& paths = {});

/// The memory that a process will need, and its limits.
struct MemoryNeed {
  int64_t bytes = 0;
  std::vector<MemoryLimit> limits;
};

struct MemoryUse {
  MemoryLimit limit;
  int64_t wanted_bytes = 0;  ///< the sum over all processes that it limits
};

/// The limit that has the least memory left when all processes of a host have taken what they need; nothing
/// if there is no limit. If processes report different free amounts, the smallest counts.
std::optional<MemoryUse> tightest(const std::vector<MemoryNeed>& needs);

}  // namespace titan::checkpoint::detail
