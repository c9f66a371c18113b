#include "titan/train/job_settings.h"

namespace titan::train {

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

}  // namespace titan::train
