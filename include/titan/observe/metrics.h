#pragma once

// Where a run's metrics go. The logged figures of each step and validation are passed to every sink that
// metrics.sinks names: "console", "jsonl" (metrics.jsonl and validation.jsonl), "tensorboard", and any sink
// that you register:
//
//   titan::train::metrics_sinks().add("statsd", [](const MetricsSinkOptions& options) {
//     return std::make_unique<StatsdSink>(options.folder);
//   });

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "titan/config/table.h"
#include "titan/core/registry.h"
#include "titan/train/run_observer.h"

namespace titan::train {

/// [metrics]
struct MetricsSettings {
  int64_t log_freq = 10;  ///< steps from one logged step to the next; the first step is always logged
  config::StringList sinks = {"jsonl", "console"};
  bool enable_tensorboard = false;  ///< adds the sink "tensorboard"
  bool disable_color_printing = false;
  std::string save_tb_folder = "tb";  ///< under dump_folder
  /// Every rank writes its metrics, not only rank 0: rank r into rank_<r> under dump_folder.
  bool save_for_all_ranks = false;
  /// Peak FLOP/s of one device; unset: by the device's name, unknown for CPUs.
  std::optional<double> peak_flops;
  /// The device that `titan plan` is asked about for plan.json: "auto", a name of configs/devices or a file, or "none".
  std::string plan_device = "auto";
  /// Measure the fourth step by kinds of operations and collectives, against the device's limits.
  bool report_roofline = false;
};

void describe(config::Table<MetricsSettings>& table);

/// Receives the metrics of one rank, on the training thread. Throw Error if they can't be written.
class MetricsSink {
 public:
  virtual ~MetricsSink() = default;

  /// Called before the first log(), and again after a rewind. Training continues after `step`: rows up to
  /// `step` that an earlier run wrote stay valid. 0: a new run.
  virtual void begin_after(int64_t /*step*/) {}
  virtual void log(const StepMetrics& metrics) = 0;
  virtual void log(const ValidationMetrics& metrics) = 0;
  /// Everything logged so far must be on disk when it returns.
  virtual void flush() {}
};

struct MetricsSinkOptions {
  MetricsSettings settings = {};
  std::filesystem::path folder;  ///< this rank's folder; may not exist yet
  int64_t total_steps = 0;
  bool on_terminal = false;  ///< standard error is a terminal: colors, progress
};

using MakeMetricsSink = std::function<std::unique_ptr<MetricsSink>(const MetricsSinkOptions& options)>;
Registry<MakeMetricsSink>& metrics_sinks();

/// Passes a trainer's metrics to this rank's sinks. Throws ConfigError for a sink that isn't registered, and
/// Error with the file's name if a folder can't be made or written (read-only, full).
class MetricsLogger : public RunObserver {
 public:
  explicit MetricsLogger(const MetricsSinkOptions& options);

  void begin_after(int64_t step) override;
  void logged(const StepMetrics& metrics) override;
  void validated(const ValidationMetrics& metrics) override;
  void flush() override;

 private:
  std::vector<std::unique_ptr<MetricsSink>> sinks_;
  bool begun_ = false;
};

}  // namespace titan::train
