#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

namespace titan::train {

/// what(), without the stack of LibTorch's own errors.
inline std::string reason_of(const std::exception& error) {
  const auto* of_libtorch = dynamic_cast<const c10::Error*>(&error);
  return of_libtorch ? of_libtorch->what_without_backtrace() : error.what();
}

}  // namespace titan::train
