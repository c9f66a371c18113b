#pragma once

// [Note: free memory] A process may have less memory available than its host: each control group that it is
// in (a container's, a SLURM job's and step's) may have a limit of its own, at which the kernel kills
// processes of the group. Files in memory (tmpfs) count towards the group whose process wrote them, as its
// own memory does.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace titan::checkpoint::detail {

/// Files of the kernel; tests use their own.
struct MemoryPaths {
  std::filesystem::path meminfo = "/proc/meminfo";
  std::filesystem::path groups = "/proc/self/cgroup";
  std::filesystem::path mounts = "/proc/self/mountinfo";
};

/// The memory that the host or a control group has left.
struct MemoryLimit {
  std::string id;  ///< the same for all processes that share it
  std::string name;
  int64_t free_bytes = 0;
  static void fields(auto& wire, auto& self) { wire(self.id, self.name, self.free_bytes); }
};

/// This process's limits: the host's, and those of its control groups (version 1 and 2) and all groups above
/// them. What can't be read limits nothing. `held_bytes`: of files in memory that will be replaced. Page
/// cache of other files counts as free: the kernel gives it up first.
std::vector<MemoryLimit> memory_limits(int64_t held_bytes, const MemoryPaths& paths = {});

/// The memory that a process will need, and its limits.
struct MemoryNeed {
  int64_t bytes = 0;
  std::vector<MemoryLimit> limits;
};

struct MemoryUse {
  MemoryLimit limit;
  int64_t wanted_bytes = 0;  ///< by all processes that it limits, together
};

/// The limit of one host's processes that has least left when all have taken what they need; nothing where
/// there is none. Where processes report different free amounts, the smallest counts.
std::optional<MemoryUse> tightest(const std::vector<MemoryNeed>& needs);

}  // namespace titan::checkpoint::detail
