#include "cli/agent_stop.h"

#include <unistd.h>

#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/train/interruption.h"

namespace titan::cli {

int code_behind_stop(const dist::Launch& launch, const train::StopCause& stop) {
  if (stop.signal == 0 || !stop.by_launcher || launch.by != "torchrun" || launch.max_restarts == 0) return 0;
  const int code = 128 + stop.signal;
  log::info(str("an agent of torchrun sent ", train::signal_name(stop.signal),
                " to its ranks, of which the run isn't through: exit code ", code,
                ", behind which the other agents start theirs again"));
  return code;
}

int signaling_launcher(const dist::Launch& launch) {
  return launch.by == "titan" || launch.by == "torchrun" ? ::getppid() : 0;
}

}  // namespace titan::cli
