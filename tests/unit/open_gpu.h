#pragma once

// Includes of this header open the CUDA plugin, if a GPU is visible, before the first test makes a tensor:
// afterwards it would be too late.

#include <gtest/gtest.h>

#include "dist/device_backend.h"

namespace titan::testing {

struct OpenGpu : ::testing::Environment {
  void SetUp() override { dist::open_cuda_plugin(); }
};

inline const ::testing::Environment* const open_gpu = ::testing::AddGlobalTestEnvironment(new OpenGpu);

}  // namespace titan::testing
