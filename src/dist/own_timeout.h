#pragma once

#include <string_view>

namespace titan::dist {

/// Begins the purpose of a group that keeps its own time limit: World::set_timeout passes it over. For one
/// whose calls are made by other threads than those of training.
inline constexpr std::string_view kOwnTimeout = "own_timeout:";

}  // namespace titan::dist
