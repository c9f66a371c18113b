#pragma once

#include <string>
#include <string_view>

namespace titan::checkpoint::detail {

/// Why a tensor, an axis or a text can't be named so; empty: it can. Names stand in files, listings and error
/// messages, and must not be taken for paths.
std::string name_problem(std::string_view name);

}  // namespace titan::checkpoint::detail
