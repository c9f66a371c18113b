#pragma once

// The format's names of dtypes.

#include <optional>
#include <string_view>

#include <c10/core/ScalarType.h>

namespace titan::detail {

/// Empty for a dtype that we don't read.
std::optional<c10::ScalarType> dtype_of_safetensors_name(std::string_view name);
/// Throws Error for a dtype that the format (or we) can't hold.
std::string_view safetensors_name_of(c10::ScalarType dtype);

}  // namespace titan::detail
