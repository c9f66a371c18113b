#include "titan/train/run_observer.h"

#include <array>

namespace titan::train {

const char* name_of(Phase phase) {
  static constexpr std::array names = {"load", "step", "data",     "forward_backward", "optimizer",
                                       "log",  "save", "validate", "check_replicas",   "finish"};
  return names[static_cast<size_t>(phase)];
}

}  // namespace titan::train
