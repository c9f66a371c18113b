#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "titan/config/table.h"

namespace titan::train {

/// [comm]
struct CommSettings {
  int64_t init_timeout_seconds = 300;   ///< rendezvous, and all but data and checkpoints in the first step
  int64_t train_timeout_seconds = 100;  ///< computing and collectives after it, without progress
  int64_t data_timeout_seconds = 600;   ///< waiting for data
  /// Loading and saving without progress; unset: checkpoint.timeout_seconds and a minute.
  std::optional<int64_t> checkpoint_timeout_seconds;
  bool watchdog = true;            ///< ends a job that goes over them, and says where each rank was
  int64_t trace_buf_size = 20000;  ///< calls that the flight recorder keeps; 0: none
  std::string save_traces_folder = "comm_traces";  ///< its records, under job.dump_folder
  std::string save_traces_file_prefix = "rank_";   ///< of their names; the rank and .json follow
  std::string backend = "auto";                    ///< "auto" (nccl on GPUs, gloo on CPUs), "gloo", "nccl"
};

void describe(config::Table<CommSettings>& table);

}  // namespace titan::train
