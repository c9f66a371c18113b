#pragma once

// What a run tells: a line on the console, an object a logged step in
// {dump_folder}/metrics.jsonl (of validation in validation.jsonl), TensorBoard events.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "titan/config/table.h"

namespace titan {
class AppendFile;
}

namespace titan::train {

class EventFileWriter;

/// [metrics]
struct MetricsSettings {
  int64_t log_freq = 10;  ///< steps from one logged step to the next; the first step is always logged
  bool enable_tensorboard = false;
  bool disable_color_printing = false;
  std::string save_tb_folder = "tb";  ///< under dump_folder
  bool save_for_all_ranks =
      false;  ///< ranks other than 0 write files too, each in a folder rank_<r> under dump_folder
  std::optional<double>
      peak_flops;  ///< of one device, in FLOP/s; unset: by the device's name, unknown for CPUs
};

void describe(config::Table<MetricsSettings>& table);

/// One logged step. Times are means over the steps since the last logged one, in seconds.
struct StepMetrics {
  int64_t step = 0;
  double loss = 0;            ///< of this step: sum over all valid tokens / their number; NaN: there are none
  double max_loss = 0;        ///< the largest of the data-parallel ranks' own means
  double grad_norm = 0;       ///< before clipping
  double lr = 0;              ///< used by this step
  double tps = 0;             ///< tokens a second and device
  double tflops = 0;          ///< of one device
  std::optional<double> mfu;  ///< percent of the peak; unset where the peak is unknown
  /// Most memory that the allocator held since the last logged step, in 1024^3 bytes. On a CPU: most that was
  /// resident since the process began, as the kernel counts it.
  double memory_gib = 0;
  double memory_percent = 0;  ///< of the device's (CPU: the machine's) memory
  /// Of a device: most memory in tensors since the last logged step.
  std::optional<double> active_gib = {}, active_percent = {};
  /// Of a device, since the process began: times that the allocator had to flush its cache to find room, and
  /// requests that failed.
  std::optional<int64_t> alloc_retries = {}, num_ooms = {};
  double data_loading_s = 0;
  double step_s = 0;
  int64_t n_tokens_seen = 0;
  int64_t local_valid_tokens = 0;             ///< labels of this step that count, of this rank
  int64_t global_valid_tokens = 0;            ///< and of all
  std::optional<int64_t> skipped_steps = {};  ///< so far, as not finite; unset: none is skipped
  /// How long saves held the steps since the last logged one up, in all; unset: nothing is saved.
  std::optional<double> checkpoint_s;
  std::optional<double>
      startup_s;  ///< seconds_since_launch() at the start of the first step; first line only
};

struct ValidationMetrics {
  int64_t step = 0;
  double loss = 0;
  double tps = 0;
  double memory_gib = 0;
  double memory_percent = 0;
};

/// The time that is left, from the pace of the steps behind the first one told, which pays for start-up.
class RemainingTime {
 public:
  explicit RemainingTime(int64_t total_steps) : total_steps_(total_steps) {}

  /// `step` has ended at `now_s` (of any clock). None at the first call.
  std::optional<double> seconds_left(int64_t step, double now_s);

 private:
  int64_t total_steps_;
  int64_t first_step_ = -1;
  double first_s_ = 0;
};

/// The sinks of one rank. Throws Error that names the file when the folder can't be made or written
/// (read-only, full).
class MetricsLogger {
 public:
  struct Options {
    MetricsSettings settings;
    std::filesystem::path folder;  ///< of metrics.jsonl and validation.jsonl
    int64_t total_steps = 0;       ///< for the progress shown on a terminal
    bool writes = true;            ///< false: this rank keeps silent
    bool on_terminal = false;      ///< colours and remaining time
  };
  explicit MetricsLogger(Options options);
  ~MetricsLogger();

  /// Opens the files. Of an earlier run the rows up to `step` stay, which this run goes on behind; 0: none.
  /// The first log() does it with 0 where nobody has.
  void begin_behind(int64_t step);

  void log(const StepMetrics& metrics);
  void log(const ValidationMetrics& metrics);
  /// Everything logged is on disk afterwards; throws as log() does.
  void flush();

 private:
  std::string remaining(int64_t step);

  Options options_;
  bool color_ = false;
  std::unique_ptr<AppendFile> step_lines_;
  std::unique_ptr<AppendFile> validation_lines_;  // made by the first validation, or one of an earlier run
  bool begun_ = false;
  std::unique_ptr<EventFileWriter> events_;
  RemainingTime remaining_;
};

/// TorchTitan's console line, for tests: two spaces between fields, ANSI colours when `color`.
std::string console_line(const StepMetrics& metrics, bool color);
std::string console_line(const ValidationMetrics& metrics, bool color);
/// "  42% 0:01:15 left"
std::string progress(int64_t step, int64_t total_steps, double seconds_left);
/// One object without line end; floats in the shortest form that reads back to the same double.
std::string json_line(const StepMetrics& metrics);
std::string json_line(const ValidationMetrics& metrics);

/// Dense bf16 peak of a device by its name ("NVIDIA H100 PCIe"), in FLOP/s; nullopt for a name that isn't
/// known.
std::optional<double> peak_flops_of(const std::string& device_name);

}  // namespace titan::train
