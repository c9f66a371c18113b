#pragma once

// [Note: roofline report]
// metrics.report_roofline: one step is measured operation by operation. For each kind of operation the report
// sets the rate that was reached beside the device's limits, its peak FLOP/s and its memory bandwidth, and
// for each kind of collective it tells the time that held the computation up from the time that didn't.
//
// Times are the device's, from events around each operation in its stream. On a CPU, where calls are
// synchronous, they are the host's. LibTorch calls the counter before and after each operation
// (at::RecordFunction) only while it exists, so that all other steps pay nothing.

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "observe/operation_costs.h"
#include "titan/dist/world.h"
#include "titan/train/run_observer.h"

namespace titan::train {

/// The most that a device can do. A rate that isn't there is unknown.
struct DeviceLimits {
  std::string source;  ///< "data sheet of NVIDIA H200"
  double bytes_per_s = 0;
  std::map<at::ScalarType, double> flops;  ///< FLOP/s of products by the operands' dtype
};

/// The calls of one kind, and of one dtype if they are products or attention.
struct OperationTotals {
  std::string kind;  ///< Operation::kind()
  int64_t calls = 0;
  OperationCost cost;
  double seconds = 0;
};

struct CountedOperations {
  std::vector<OperationTotals> operations;
  /// How long the computation stood still for other ranks, by the collective that it waited for.
  std::map<std::string, double> exposed_s;
  double span_s = 0;  ///< from the counter's start to its end, in the stream that computes
  double idle_s = 0;  ///< part of it in no operation of that stream, and in no such wait
};

/// Counts the operations of the process while it lives: on a CPU those of the thread that made it, on a GPU
/// those that have tensors there. There is at most one at a time.
class OperationCounter {
 public:
  explicit OperationCounter(c10::Device device);
  ~OperationCounter();
  OperationCounter(const OperationCounter&) = delete;
  OperationCounter& operator=(const OperationCounter&) = delete;

  /// From now on, operations that memory limits count as the optimizer's.
  void begin_optimizer();
  /// Ends counting, and waits for the device.
  CountedOperations finish();

  struct State;

 private:
  void stop();
  std::shared_ptr<State> state_;
  uint64_t operations_handle_ = 0, waits_handle_ = 0;
};

/// Measures the fourth step after the start, from its data to its optimizer, and then logs the table and
/// writes roofline.json.
class RooflineReport final : public RunObserver {
 public:
  /// Steps before the one that is measured, which set up everything lazy.
  static constexpr int64_t kWarmUpSteps = 3;

  struct Options {
    std::optional<std::filesystem::path> folder;  ///< the file's; unset: this rank writes none
    DeviceLimits limits;                          ///< without a source: a CPU's, measured after the step
  };
  RooflineReport(const dist::World& world, Options options);
  ~RooflineReport() override;

  void begin(Phase phase, int64_t step) override;
  void end(Phase phase, int64_t step, bool failed) override;
  void flush() override;

 private:
  void report(int64_t step);

  dist::World world_;
  Options options_;
  int64_t steps_ = 0;
  bool reported_ = false;
  uint64_t first_call_ = 0;  // number in the flight recorder
  std::unique_ptr<OperationCounter> counter_;
};

}  // namespace titan::train
