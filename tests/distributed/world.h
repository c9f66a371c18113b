#pragma once

// The ranks that run a distributed test. `titan launch` starts the test program on each rank, and every rank
// runs all tests in the same order.

#include <c10/core/TensorOptions.h>

#include <string>

#include "titan/core/error.h"
#include "titan/dist/world.h"

namespace titan::testing {

/// main() creates and ends it.
const dist::World& world();

/// Whether the test was started with --all, which runs all cases (nightly) instead of a selection.
bool all_cases();

/// The device for tests that use it: cpu, or with --device cuda this rank's GPU.
inline at::Device device() { return world().device(); }
inline at::TensorOptions options_of(at::ScalarType dtype) {
  return at::TensorOptions().dtype(dtype).device(device());
}

/// The message of the Error that `call` throws; "" if it throws none.
template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace titan::testing
