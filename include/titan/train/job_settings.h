#pragma once

// The tables [job], [debug] and [experimental]: what the run is called, how it is seeded, whose code joins
// it.

#include <optional>
#include <string>

#include "titan/config/table.h"

namespace titan::train {

/// [job]
struct JobSettings {
  std::optional<std::string> config_file;  ///< the same as the positional argument of `titan train`
  std::string dump_folder = "./outputs";   ///< root of everything that a run writes
  std::string description = "default job";
  bool print_config = false;  ///< log the resolved config at the start
  std::optional<std::string>
      save_config_file;  ///< JSON, under dump_folder; config.toml is always written there
};

/// [debug]
struct DebugSettings {
  /// Of weights, of the data's order where data.seed is unset, and, raised by the data-parallel rank, of
  /// LibTorch's own generators (dropout). Unset: 0, so that equal configs give equal runs.
  std::optional<int64_t> seed;
  bool deterministic = false;
  bool deterministic_warn_only = false;
  bool check_collectives = false;  ///< dist::InitOptions::check_collectives
  bool detect_anomaly = false;     ///< AnomalyTrace (train/nan_trace.h)
  bool nan_trace = false;          ///< NanTrace

  uint64_t seed_or_default() const { return static_cast<uint64_t>(seed.value_or(0)); }
};

/// [experimental]
struct ExperimentalSettings {
  std::string custom_import;  ///< a shared object with `extern "C" void titan_register()`; "" for none
};

void describe(config::Table<JobSettings>& table);
void describe(config::Table<DebugSettings>& table);
void describe(config::Table<ExperimentalSettings>& table);

}  // namespace titan::train
