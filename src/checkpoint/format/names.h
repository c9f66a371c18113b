#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "titan/checkpoint/manifest.h"

namespace titan::checkpoint::detail {

/// Why a tensor, an axis or a text can't be named so; empty: it can. Names stand in files, listings and error
/// messages, and must not be taken for paths.
std::string name_problem(std::string_view name);

/// A folder "step-N" whose manifest is of another step was renamed, or mixed from two. A copy under a name of
/// another kind is what its manifest says.
std::optional<std::string> name_problem(const std::filesystem::path& step_folder, const Manifest& manifest);

}  // namespace titan::checkpoint::detail
