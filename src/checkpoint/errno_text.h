#pragma once

#include <cstring>
#include <string>

#include "titan/core/error.h"

namespace titan::detail {

/// "No space left on device (ENOSPC)"
inline std::string errno_text(int error) {
  const char* name = strerrorname_np(error);
  return str(std::strerror(error), " (", name != nullptr ? name : "unknown errno", ")");
}

}  // namespace titan::detail
