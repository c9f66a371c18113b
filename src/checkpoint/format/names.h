#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "titan/checkpoint/manifest.h"

namespace titan::checkpoint::detail {

/// Why a tensor, an axis or a text can't have this name; empty: it can. Names appear in files, listings and
/// error messages, and must not be mistaken for paths.
std::string name_problem(std::string_view name);

/// A folder "step-N" whose manifest is another step's was renamed, or mixed from two. A copy under any other
/// name is what its manifest says.
std::optional<std::string> step_name_problem(const std::filesystem::path& step_folder,
                                             const Manifest& manifest);

}  // namespace titan::checkpoint::detail
