#include "titan/train/comm_settings.h"

namespace titan::train {

void describe(config::Table<CommSettings>& table) {
  table.field("init_timeout_seconds", &CommSettings::init_timeout_seconds,
              "time limit of the rendezvous, and of collectives up to the end of the first step",
              config::at_least(1));
  table.field("train_timeout_seconds", &CommSettings::train_timeout_seconds,
              "time limit of collectives after the first step", config::at_least(1));
  table.field("backend", &CommSettings::backend,
              "\"auto\" is nccl on GPUs and gloo on CPUs; gloo also lets several ranks share a GPU",
              config::one_of({"auto", "gloo", "nccl"}));
  table.refused("trace_buf_size", int64_t{20000},
                "the ring of collectives has a fixed size; its dumps come later");
  table.refused("save_traces_folder", std::string("comm_traces"),
                "dumps of the ring of collectives come later");
  table.refused("save_traces_file_prefix", std::string("rank_"),
                "dumps of the ring of collectives come later");
  table.refused("mode", std::string("default"), "dry runs on a fake backend come later");
}

}  // namespace titan::train
