#include "device_choice.h"

#include "titan/core/error.h"

namespace titan::dist {

std::string missing_plugin_warning(const DeviceSituation& situation) {
  if (situation.wanted == "cpu" || !situation.gpu_visible) return "";
  std::error_code ignored;
  if (std::filesystem::exists(situation.plugin, ignored)) return "";
  return str("a GPU is visible, but this job runs on the CPU: ", situation.plugin.string(),
             " wasn't built. Install nvcc and a LibTorch with CUDA, configure and build again (target "
             "titan_cuda), or set training.device = \"cpu\"");
}

}  // namespace titan::dist
