#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "titan/checkpoint/manifest.h"

namespace titan::checkpoint::detail {

/// A folder "step-N" whose manifest is of another step was renamed, or mixed from two. A copy under a name of
/// another kind is what its manifest says.
std::optional<std::string> name_problem(const std::filesystem::path& step_folder, const Manifest& manifest);

}  // namespace titan::checkpoint::detail
