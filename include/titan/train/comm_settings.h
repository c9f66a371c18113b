#pragma once

#include <string>

#include "titan/config/table.h"

namespace titan::train {

/// [comm]
struct CommSettings {
  int64_t init_timeout_seconds = 300;   ///< rendezvous, and collectives up to the end of the first step
  int64_t train_timeout_seconds = 100;  ///< collectives after it
  std::string backend = "auto";         ///< "auto" (nccl on GPUs, gloo on CPUs), "gloo", "nccl"
};

void describe(config::Table<CommSettings>& table);

}  // namespace titan::train
