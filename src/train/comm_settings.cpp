#include "titan/train/comm_settings.h"

namespace titan::train {

void describe(config::Table<CommSettings>& table) {
  table.field(
      "init_timeout_seconds", &CommSettings::init_timeout_seconds,
      "time limit of the rendezvous, and of computing and collectives up to the end of the first step",
      config::at_least(1));
  table.field("train_timeout_seconds", &CommSettings::train_timeout_seconds,
              "time limit of computing and of collectives after the first step: of the time in which a rank "
              "doesn't go on",
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
