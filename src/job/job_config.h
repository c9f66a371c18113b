#pragma once

// All tables of a run. Only the command line and the trainer's builder see the whole; everything else takes
// its own table.

#include <memory>
#include <string>
#include <vector>

#include "job/settings.h"
#include "observe/profiling.h"
#include "observe/stragglers.h"
#include "observe/structured_log.h"
#include "titan/config/load.h"
#include "titan/data/loader.h"
#include "titan/float8/recipe.h"
#include "titan/nn/loss.h"
#include "titan/observe/metrics.h"
#include "titan/ops/linear.h"
#include "titan/optim/lr_schedule.h"
#include "titan/train/model_spec.h"
#include "titan/train/parallel_dims.h"
#include "train/checkpoints/checkpoint_settings.h"
#include "train/policies/fault_tolerance.h"
#include "train/policies/validation.h"

namespace titan::data {
class Tokenizer;
}

namespace titan::train {

/// The data set of token ids in files, which needs no tokenizer.
inline constexpr const char* kStoredTokens = "tokens";

struct JobConfig {
  JobSettings job;
  ProfilingSettings profiling;
  MetricsSettings metrics;
  StructuredLogSettings structured_logs;  ///< [metrics.structured_logs]
  StragglerSettings stragglers;           ///< [metrics.stragglers]
  ModelSettings model;
  nn::LossSettings loss;
  config::DynamicTable loss_args;   ///< [loss.args]; `settings` is what the loss's LossKind takes as args
  config::DynamicTable model_args;  ///< [model.args]; `settings` is what the family's ModelSpec takes as args
  optim::OptimizerSettings optimizer;
  config::DynamicTable optimizer_args;  ///< [optimizer.args]
  optim::LrSchedulerSettings lr_scheduler;
  config::DynamicTable lr_scheduler_args;  ///< [lr_scheduler.args]
  TrainingSettings training;
  data::DataSettings data;
  ParallelismSettings parallelism;
  CheckpointSettings checkpoint;
  ActivationCheckpointSettings activation_checkpoint;
  CompileSettings compile;
  float8::QuantizeSettings quantize;
  CommSettings comm;
  ops::OpsSettings ops;
  MemoryEstimationSettings memory_estimation;
  FaultToleranceSettings fault_tolerance;
  ExperimentalSettings experimental;
  ValidationSettings validation;
  DebugSettings debug;

  const ModelSpec& spec() const { return *model_specs().get(model.name); }
  const void* args() const { return model_args.settings.get(); }
  /// "llama3 8B", or "llama3 debugmodel with other sizes".
  std::string model_title() const;
  /// Whether training or validation needs the tokenizer.
  bool reads_text() const {
    return training.dataset != kStoredTokens || (validation.enable && validation.dataset != kStoredTokens);
  }
};

/// The tables of JobConfig under their names. [model.args] is resolved once [model] and [experimental] are
/// read, after the shared object of experimental.custom_import was opened. model.name = "auto" is replaced by
/// the family of the config.json in model.hf_assets_path, whose sizes [model.args] then starts from.
const config::Schema& job_schema();

/// Every key of TorchTitan 0.2.2's JobConfig with its default there, for docs/torchtitan_keys.md.
const std::vector<config::ForeignKey>& torchtitan_keys();

/// Which of the files that the job will read check_job looks at: data sets, recorded batches, tokenizer and
/// initial weights; the tokenizer alone; none.
enum class JobFiles { Check, Tokenizer, Ignore };

/// Files read by the check that the job reuses.
struct CheckedFiles {
  std::shared_ptr<const data::Tokenizer> tokenizer;  ///< null: none is needed, or files weren't looked at
};

/// Checks settings across tables, and files. One ConfigError has all problems, each with the place of its
/// value. Needs no process group: `world_size` comes from the launcher's environment or from --nproc.
CheckedFiles check_job(const JobConfig& config, const config::Origins& origins, int world_size,
                       JobFiles files = JobFiles::Check);

/// The findings of a check before the start: how the job would begin, and everything that keeps it from
/// starting.
struct StartReport {
  std::vector<std::string> facts;
  std::vector<std::string> problems;
};
/// check_job with the files, and then what a start finds later: a folder that can't be written, a state that
/// doesn't fit the model, a model that can't be built or parallelized, too little memory. Builds rank 0's
/// part with sizes only, and reads the headers of files. `all_here`: all ranks will run on this machine.
StartReport check_start(const JobConfig& config, const config::Origins& origins, int world_size,
                        bool all_here);

/// The token that ends a document, if attention stays within documents; else nullopt. `tokenizer` is null if the job reads
/// no text. Throws ConfigError if neither settings nor tokenizer name the token.
std::optional<int64_t> document_end(const JobConfig& config, const data::Tokenizer* tokenizer);

/// Whether the ranks will compute on a CPU.
bool runs_on_cpu(const JobConfig& config);

/// Opens a shared object and calls its `extern "C" void titan_register()`, once per path; "" does nothing.
/// Throws ConfigError when it can't be opened or has no such function.
void import_custom_code(const std::string& path);

}  // namespace titan::train
