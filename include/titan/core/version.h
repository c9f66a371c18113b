#pragma once

namespace titan {

inline constexpr const char* kVersion = "0.1.0";

}  // namespace titan
