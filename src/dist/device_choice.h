#pragma once

#include <filesystem>
#include <string>

namespace titan::dist {

struct DeviceSituation {
  std::string wanted;            ///< InitOptions::device
  bool gpu_visible = false;      ///< the driver shows one
  std::filesystem::path plugin;  ///< which may not be there
};

/// What to tell the user of a job that runs on the CPU beside a GPU because the plugin wasn't built; empty
/// where there is nothing to tell.
std::string missing_plugin_warning(const DeviceSituation& situation);

}  // namespace titan::dist
