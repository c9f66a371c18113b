#include "titan/train/refused_settings.h"

namespace titan::train {

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

}  // namespace titan::train
