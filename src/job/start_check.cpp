// The checks of `titan train --check`: everything that a start would find, without ranks.

#include <unistd.h>

#include <filesystem>
#include <optional>

#include "core/process.h"
#include "core/units.h"
#include "dist/device_backend.h"
#include "job/build.h"
#include "job/dry_run.h"
#include "titan/core/error.h"
#include "titan/parallel/parameters.h"

namespace titan::train {

namespace {

namespace fs = std::filesystem;

class StartCheck {
 public:
  StartCheck(const JobConfig& config, const config::Origins& origins, int world_size)
      : config_(config), origins_(origins), world_size_(world_size) {}

  StartReport report;

  /// Runs `check`; what it throws is a problem.
  template <class Check>
  bool judge(const Check& check) {
    const size_t before = report.problems.size();
    try {
      check();
    } catch (const ConfigError& error) {
      report.problems.insert(report.problems.end(), error.problems().begin(), error.problems().end());
    } catch (const std::exception& error) {  // the model may be a user's
      report.problems.push_back(reason_of(error));
    }
    return report.problems.size() == before;
  }

  void check_dump_folder() {
    fs::path there = fs::absolute(config_.job.dump_folder);
    std::error_code ignored;
    while (!fs::exists(there, ignored) && there.has_relative_path()) there = there.parent_path();
    if (!fs::is_directory(there, ignored) || ::access(there.c_str(), W_OK | X_OK) != 0)
      report.problems.push_back(origins_.problem("job.dump_folder", str("can't be written: ", there.string(),
                                                                        " isn't a folder in which you may "
                                                                        "make files")));
  }

  void find_start(const std::optional<CheckedFiles>& checked) {
    const auto model = config_.spec().build(
        config_.args(), {.construct = deferred(at::kMeta, scalar_type(config_.training.dtype)),
                         .seq_len = config_.training.seq_len});
    report.facts.push_back(train::find_start(config_, parameters(model->root()), checked, report.problems));
  }

  void check_devices() {
    dist::check_devices({.backend = config_.comm.backend, .device = config_.training.device}, world_size_);
  }

  void build_model() {
    build_each_stage(config_, world_size_);
    const ModelSizes sizes = config_.spec().sizes(config_.args());
    report.facts.push_back(
        str(config_.model_title(), ", ", sizes.num_params, " parameters, on ", world_size_, " rank(s)"));
  }

  void estimate_memory(bool all_here) {
    MemoryReport memory;
    try {
      memory = memory_report(config_, world_size_, /*rank=*/0, runs_on_cpu(config_) ? at::kCPU : at::kCUDA);
    } catch (const std::exception& error) {
      report.facts.push_back(str("memory: unknown, because ", reason_of(error)));
      return;
    }
    report.facts.push_back("memory of rank 0 at the peak of a step, computed from sizes:\n" +
                           table_of(memory));
    if (all_here) compare_with_machine(memory.total_bytes());
  }

 private:
  // The estimate leaves out temporary memory, so a run that exceeds the machine's can't succeed.
  void compare_with_machine(double bytes) {
    const bool on_cpu = runs_on_cpu(config_);
    if (!on_cpu && !dist::gpu_visible()) return;
    dist::DeviceBackend* const backend = on_cpu ? nullptr : dist::open_cuda_plugin();
    if (!on_cpu && !backend) return;
    const int here = on_cpu ? world_size_ : 1;
    const double has =
        on_cpu ? machine_memory_gib() * kGiB : static_cast<double>(backend->memory(/*index=*/0).total_bytes);
    if (here * bytes <= has) return;
    report.problems.push_back(
        str("memory: ", on_cpu ? str("the ", here, " rank(s) on this machine need") : "a rank needs",
            " at least ", size_text(static_cast<int64_t>(here * bytes)), ", but ",
            on_cpu ? "it has " : "this GPU has ", size_text(static_cast<int64_t>(has)),
            "; the report lists settings that would use less"));
  }

  const JobConfig& config_;
  const config::Origins& origins_;
  int world_size_;
};

}  // namespace

StartReport check_start(const JobConfig& config, const config::Origins& origins, int world_size,
                        bool all_here) {
  StartCheck check(config, origins, world_size);
  std::optional<CheckedFiles> checked;
  check.judge([&] { checked = check_job(config, origins, world_size, JobFiles::Check); });
  check.check_dump_folder();
  // A model with wrong sizes or degrees can't be built.
  StartCheck settings(config, origins, world_size);
  if (!settings.judge([&] { check_job(config, origins, world_size, JobFiles::Ignore); })) return check.report;
  if (!check.judge([&] { check.build_model(); })) return check.report;
  check.judge([&] { check.find_start(checked); });
  if (all_here) check.judge([&] { check.check_devices(); });
  check.estimate_memory(all_here);
  return check.report;
}

}  // namespace titan::train
