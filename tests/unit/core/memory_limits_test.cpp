#include "core/memory_limits.h"

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/checkpoint/temp_folder.h"

namespace titan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
namespace fs = std::filesystem;

constexpr int64_t kMiB = 1 << 20;

/// Made-up files of a kernel.
class MemoryLimits : public ::testing::Test {
 protected:
  MemoryLimits() {
    write("meminfo",
          "MemTotal:       16777216 kB\nMemFree:          100000 kB\nMemAvailable:    4096000 kB\n");
    write("cgroup", "");
    write("mountinfo", "22 1 0:5 / /proc rw - proc proc rw\n");
  }

  void write(const std::string& name, const std::string& text) const {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name) << text;
  }
  /// Writes the files of a version 2 group, in `groups`/.
  void write_group(const std::string& name, const std::string& limit, int64_t usage,
                   const std::string& stat = "") const {
    write("groups/" + name + "/memory.max", limit + "\n");
    write("groups/" + name + "/memory.high", "max\n");
    write("groups/" + name + "/memory.current", std::to_string(usage) + "\n");
    write("groups/" + name + "/memory.stat", stat);
  }
  void mount_groups(const std::string& root = "/") const {
    write("mountinfo", "22 1 0:5 / /proc rw - proc proc rw\n30 22 0:26 " + root + " " +
                           (folder_ / "groups").string() +
                           " rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  std::vector<MemoryLimit> limits(int64_t held_bytes = 0) const {
    return memory_limits(
        held_bytes,
        {.meminfo = folder_ / "meminfo", .groups = folder_ / "cgroup", .mounts = folder_ / "mountinfo"});
  }
  /// The free memory of each limit, in MiB.
  std::vector<int64_t> free(int64_t held_bytes = 0) const {
    std::vector<int64_t> sizes;
    for (const MemoryLimit& limit : limits(held_bytes)) sizes.push_back(limit.free_bytes / kMiB);
    return sizes;
  }

  const titan::testing::TempFolder folder_;
};

TEST_F(MemoryLimits, UsesTheHostWithoutControlGroups) {
  EXPECT_THAT(free(), ElementsAre(4000));
  EXPECT_THAT(free(200 * kMiB), ElementsAre(4200)) << "files that will be replaced count as free";
  fs::remove(folder_ / "meminfo");
  fs::remove(folder_ / "mountinfo");
  EXPECT_THAT(limits(), IsEmpty()) << "a limit that can't be read doesn't count";
}

TEST_F(MemoryLimits, ReadsVersion2GroupsUpToTheRoot) {
  write("cgroup", "0::/job_7/step_0/task_1\n");
  mount_groups();
  write_group("job_7", std::to_string(1000 * kMiB), 400 * kMiB);
  write_group("job_7/step_0", "max", 300 * kMiB);
  write_group("job_7/step_0/task_1", std::to_string(700 * kMiB), 50 * kMiB);
  EXPECT_THAT(free(), ElementsAre(4000, 650, 600));
  EXPECT_THAT(limits()[2].name, HasSubstr("groups/job_7"));

  write("groups/job_7/memory.high", std::to_string(500 * kMiB));
  EXPECT_THAT(free(), ElementsAre(4000, 650, 100)) << "above memory.high processes are throttled";
  write("groups/job_7/memory.current", std::to_string(600 * kMiB));
  EXPECT_THAT(free(), ElementsAre(4000, 650, 0));
}

TEST_F(MemoryLimits, ReadsVersion1MemoryController) {
  write("cgroup", "9:name=systemd:/\n5:cpu,cpuacct:/elsewhere\n4:memory:/slurm/job_7\n0::/system.slice\n");
  const std::string memory = (folder_ / "memory").string(), cpu = (folder_ / "cpu").string();
  write("mountinfo", "31 23 0:28 / " + cpu + " rw - cgroup cgroup rw,cpu,cpuacct\n" + "32 23 0:29 / " +
                         memory + " rw,relatime - cgroup cgroup rw,memory\n");
  write("memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("memory/memory.usage_in_bytes", "123456789\n");
  write("memory/slurm/job_7/memory.limit_in_bytes", std::to_string(800 * kMiB) + "\n");
  write("memory/slurm/job_7/memory.usage_in_bytes", std::to_string(700 * kMiB) + "\n");
  write("memory/slurm/job_7/memory.stat",
        "inactive_file 1\ntotal_inactive_file " + std::to_string(100 * kMiB) + "\ntotal_active_file " +
            std::to_string(20 * kMiB) + "\ntotal_shmem " + std::to_string(300 * kMiB) + "\n");
  EXPECT_THAT(free(), ElementsAre(4000, 220)) << "page cache is free, files in memory aren't";
  EXPECT_THAT(free(200 * kMiB), ElementsAre(4200, 420)) << "except those that will be replaced";
  EXPECT_THAT(free(2000 * kMiB), ElementsAre(6000, 520)) << "another group may have written some of them";
}

// A container sees only its own group's folders, with or without a namespace for them.
TEST_F(MemoryLimits, ReadsAContainersMount) {
  write_group("", std::to_string(900 * kMiB), 100 * kMiB);
  mount_groups();
  write("cgroup", "0::/\n");
  EXPECT_THAT(free(), ElementsAre(4000, 800));
  write("cgroup", "0::/../../docker/123\n");
  EXPECT_THAT(free(), ElementsAre(4000, 800));
  mount_groups("/docker/123");
  write("cgroup", "0::/docker/123\n");
  EXPECT_THAT(free(), ElementsAre(4000, 800));
  write("cgroup", "0::/kubepods/123\n");
  EXPECT_THAT(free(), ElementsAre(4000, 800));
  write_group("inner", std::to_string(300 * kMiB), 0);
  write("cgroup", "0::/docker/123/inner\n");
  EXPECT_THAT(free(), ElementsAre(4000, 300, 800));
}

TEST_F(MemoryLimits, CountsAHierarchyMountedTwiceOnce) {
  write_group("a group", std::to_string(900 * kMiB), 100 * kMiB);
  write("cgroup", "0::/a group\n");
  const std::string point = (folder_ / "groups").string();
  write("mountinfo", "30 22 0:26 / " + point + " rw - cgroup2 cgroup2 rw\n31 22 0:26 /a\\040group " + point +
                         "/a\\040group rw - cgroup2 cgroup2 rw\n");
  EXPECT_THAT(free(), ElementsAre(4000, 800));
}

TEST_F(MemoryLimits, TheLeastOneIsWhatAProcessMayTake) {
  const auto usable = [&] {
    return usable_memory_bytes({.meminfo = folder_ / "meminfo",
                                .groups = folder_ / "cgroup",
                                .mounts = folder_ / "mountinfo"}) /
           kMiB;
  };
  EXPECT_EQ(usable(), 16384);
  write("cgroup", "0::/job_7\n");
  mount_groups();
  write_group("job_7", std::to_string(700 * kMiB), 600 * kMiB);
  EXPECT_EQ(usable(), 700) << "whatever is in use of it";
  write_group("job_7", "max", 600 * kMiB);
  EXPECT_EQ(usable(), 16384);
}

}  // namespace
}  // namespace titan
