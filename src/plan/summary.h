#pragma once

// The sums of a trace.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/trace.h"

namespace titan::plan {

using BytesByCategory = std::array<int64_t, kNumCategories>;

struct NamedAmount {
  std::string name;
  int64_t bytes = 0;
};

/// Memory after some of the trace's entries.
struct MemoryPoint {
  size_t entry = 0;  ///< how many came before
  int step = 0;      ///< 0: before the first step
  std::string module;
  BytesByCategory bytes{};
};

/// A module's memory of one category, as it changes over the points of Summary::over_time.
struct ModuleMemory {
  std::string module;
  Category category = Category::Activations;
  struct Change {
    size_t point = 0;   ///< the first point that has it, and those after it until the next change
    int64_t bytes = 0;  ///< in use
  };
  std::vector<Change> changes;
};

struct LaunchTotals {
  std::string name;
  int64_t launches = 0;
  double flops = 0, bytes_read = 0, bytes_written = 0;
};

struct CollectiveTotals {
  std::string op, group, label;  ///< the label without its module: "fsdp::all_gather"
  int group_size = 0;
  int64_t stream = 0;
  int64_t calls = 0, bytes = 0;

  /// Calls that don't differ.
  struct Call {
    std::string module;  ///< the rest of the label: "layers.3"
    int64_t bytes = 0;   ///< each one's
    int64_t calls = 0;
  };
  std::vector<Call> each;  ///< in the order of the first ones
};

struct Summary {
  MemoryPoint peak;                         ///< where most is allocated
  BytesByCategory most_bytes{};             ///< the most that each category takes, at different times
  std::vector<NamedAmount> peak_by_module;  ///< the modules that allocated it, largest first
  /// At most kMostPoints, evenly over the trace, each the highest of its part; and where the last step's first backward begins, as activations of
  /// modules are most there.
  std::vector<MemoryPoint> over_time;
  static constexpr size_t kMostPoints = 200;
  std::vector<ModuleMemory> by_module;  ///< in the order of their first changes

  // ---- of the last step

  BytesByCategory at_backward{};  ///< when the first module's backward begins
  size_t backward_point = 0;      ///< this moment's place in over_time
  BytesByCategory after_step{};   ///< after the last kernel: what stays from step to step
  int64_t num_launches = 0;
  int64_t num_allocations = 0;
  double flops = 0;
  std::vector<LaunchTotals> launches;  ///< by name
  std::vector<CollectiveTotals> collectives;
};

int64_t total(const BytesByCategory& bytes);

Summary summarize(const Trace& trace);

}  // namespace titan::plan
