#include "job/settings.h"

#include <algorithm>

#include "titan/core/error.h"

namespace titan::train {

void describe(config::Table<ModelSettings>& table) {
  table.field("name", &ModelSettings::name, "model family");
  table.field("flavor", &ModelSettings::flavor, "sizes of the family; keys of [model.args] override them");
  table.field("hf_assets_path", &ModelSettings::hf_assets_path,
              "folder with the tokenizer's tokenizer.json, from the working directory if it is relative, or "
              "\"bytes\" for a token per byte");
  table.mapped("tokenizer_path", "hf_assets_path", "deprecated in TorchTitan");
  table.field("converters", &ModelSettings::converters,
              "rewrites of the model before it is spread out; of TorchTitan's names there are "
              "\"quantize.linear.float8\" and \"quantize.linear.mx\", one of them",
              config::one_of({"quantize.linear.float8", "quantize.linear.mx", "quantize.grouped_mm.float8",
                              "quantize.grouped_mm.mx"}));
  table.field("print_after_conversion", &ModelSettings::print_after_conversion,
              "log for each linear layer whether it was converted, or why not");
}

bool ModelSettings::converts(const std::string& name) const {
  return std::find(converters.begin(), converters.end(), name) != converters.end();
}

namespace {

void describe_batches(config::Table<TrainingSettings>& table) {
  table.field("dataset", &TrainingSettings::dataset, "data source; see docs/data.md");
  table.field("dataset_path", &TrainingSettings::dataset_path,
              "file, folder or glob that the source reads, from the working directory if it is relative");
  table.field("local_batch_size", &TrainingSettings::local_batch_size,
              "sequences per data-parallel rank and micro-batch", config::at_least(1));
  table.field("global_batch_size", &TrainingSettings::global_batch_size,
              "sequences per optimizer step, by accumulation where needed; -1: local_batch_size x "
              "data-parallel ranks",
              config::positive_or_minus_one());
  table.field("seq_len", &TrainingSettings::seq_len, "tokens per sequence", config::at_least(1));
  table.table("dataloader", &TrainingSettings::dataloader);
}

void describe_precision(config::Table<TrainingSettings>& table) {
  table.field("dtype", &TrainingSettings::dtype,
              "of the parameters that the optimizer owns, and of its states",
              config::one_of({"float32", "bfloat16", "float64"}));
  table.field("mixed_precision_param", &TrainingSettings::mixed_precision_param,
              "of the parameters in forward and backward",
              config::one_of({"bfloat16", "float32", "float64"}));
  table.field("mixed_precision_reduce", &TrainingSettings::mixed_precision_reduce,
              "in which gradients are summed over ranks", config::one_of({"float32", "float64"}));
}

}  // namespace

void describe(config::Table<TrainingSettings>& table) {
  describe_batches(table);
  describe_precision(table);
  table.field("max_norm", &TrainingSettings::max_norm, "gradients are scaled down to this 2-norm",
              config::at_least(0));
  table.field("steps", &TrainingSettings::steps, "optimizer steps", config::at_least(1));
  table.field("enable_cpu_offload", &TrainingSettings::enable_cpu_offload,
              "keep sharded parameters, gradients and optimizer states in pinned host memory; GPUs only");
  table.without_effect("gc_freq", int64_t{50}, "paces Python's garbage collector, which isn't there",
                       config::at_least(1));
  table.without_effect("gc_debug", false, "is about Python's garbage collector, which isn't there");
  table.field("device", &TrainingSettings::device, "\"auto\" takes a GPU when there is one",
              config::one_of({"auto", "cpu", "cuda"}));
}

at::ScalarType scalar_type(const std::string& name) {
  if (name == "float32") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float16") return at::kHalf;
  if (name == "float64") return at::kDouble;
  throw ConfigError(str("unknown dtype '", name, "'; known: float32 bfloat16 float16 float64"));
}

void describe(config::Table<JobSettings>& table) {
  table.field("config_file", &JobSettings::config_file,
              "config file, the same as the argument of titan train");
  table.field("dump_folder", &JobSettings::dump_folder, "folder for everything that the run writes");
  table.field("description", &JobSettings::description, "free text, logged at the start");
  table.field("print_config", &JobSettings::print_config, "log the resolved config at the start");
  table.field("save_config_file", &JobSettings::save_config_file,
              "also save the resolved config under this name in dump_folder (config.toml is always saved)");
  table.refused("custom_config_module", std::string(),
                "settings of your own come with your code: see docs/extending.md");
}

void describe(config::Table<DebugSettings>& table) {
  table.field(
      "seed", &DebugSettings::seed,
      "seed of weights, of the data's order (unless data.seed is set) and, plus the data-parallel rank, "
      "of LibTorch's generators (dropout); unset: 0, so that equal configs give equal runs",
      config::at_least(0));
  table.field("deterministic", &DebugSettings::deterministic,
              "deterministic GPU kernels only (CPU runs are bit-equal anyway)");
  table.field("deterministic_warn_only", &DebugSettings::deterministic_warn_only,
              "with deterministic: warn, instead of stopping, where no deterministic kernel exists");
  table.field(
      "check_collectives", &DebugSettings::check_collectives,
      "compare every collective call with the group's other ranks before it starts (operation, sizes, "
      "dtype, where in the program), and what is received with what was sent: a difference stops all of "
      "them and names the calls; slow");
  table.field(
      "detect_anomaly", &DebugSettings::detect_anomaly,
      "autograd's anomaly mode: stop at the first operation whose backward makes a gradient that isn't "
      "finite, naming it, the module that recorded it and the stack of that forward; very slow");
  table.field("nan_trace", &DebugSettings::nan_trace,
              "look at every module's outputs and gradients: stop at the first that isn't finite, naming the "
              "module, step and rank, with statistics of what it was given; slow");
  table.refused("moe_force_load_balance", false, "there are no mixture-of-experts models yet");
}

void describe(config::Table<ExperimentalSettings>& table) {
  table.field(
      "custom_import", &ExperimentalSettings::custom_import,
      "shared object whose titan_register() adds models, data sources, ... by name; see docs/extending.md");
  table.refused("custom_args_module", std::string(), "deprecated in TorchTitan; see docs/extending.md");
}

namespace {

using config::StringList;
using std::string;

}  // namespace

void describe(config::Table<CompileSettings>& table) {
  const char* none = "there is no compiler: fused operations are written out";
  table.refused("enable", false, none);
  table.refused("components", StringList{"model", "loss"}, none, "enable", config::one_of({"model", "loss"}));
  table.refused("backend", string("inductor"), none, "enable");
}

void describe(config::Table<MemoryEstimationSettings>& table) {
  table.refused("enable", false, "dry runs come later");
  table.refused("disable_fake_mode", false, "dry runs come later", "enable");
}

void describe(config::Table<CommSettings>& table) {
  table.field(
      "init_timeout_seconds", &CommSettings::init_timeout_seconds,
      "time limit of the rendezvous, and of computing and collectives up to the end of the first step",
      config::at_least(1));
  table.field(
      "train_timeout_seconds", &CommSettings::train_timeout_seconds,
      "time limit of computing and of collectives after the first step, counted while a rank makes no "
      "progress",
      config::at_least(1));
  table.field("data_timeout_seconds", &CommSettings::data_timeout_seconds,
              "time limit of waiting for a step's data", config::at_least(1));
  table.field("checkpoint_timeout_seconds", &CommSettings::checkpoint_timeout_seconds,
              "time limit of loading or saving without progress; unset: checkpoint.timeout_seconds and a "
              "minute, so that a save's own error comes first",
              config::at_least(1));
  table.field("watchdog", &CommSettings::watchdog,
              "when a rank hangs, have every rank print where its threads are, name the culprit and end; "
              "false: collectives alone have time limits");
  table.field("backend", &CommSettings::backend,
              "\"auto\" is nccl on GPUs and gloo on CPUs; gloo also lets several ranks share a GPU",
              config::one_of({"auto", "gloo", "nccl"}));
  table.field("trace_buf_size", &CommSettings::trace_buf_size,
              "calls that each rank's flight recorder keeps, some 256 bytes each; 0 keeps none",
              config::in_range(0, 500000));
  table.field(
      "save_traces_folder", &CommSettings::save_traces_folder,
      "folder under job.dump_folder for the flight records: written when a rank fails, crashes or gets "
      "SIGQUIT, and by titan debug dump; titan debug flight reads them");
  table.field("save_traces_file_prefix", &CommSettings::save_traces_file_prefix,
              "how their file names begin; the rank and .json follow");
  table.refused("mode", std::string("default"), "dry runs on a fake backend come later");
}

}  // namespace titan::train
