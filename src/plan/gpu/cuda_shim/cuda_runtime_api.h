#pragma once

// The plugin's operations (src/cuda_plugin/ops.cpp, float8.cpp) are compiled a second time for planned devices. The headers of this
// folder take the place of CUDA's and of LibTorch's for CUDA, so that a plan needs neither: they declare what those sources use.

#include <cstdint>

using cudaStream_t = struct CUstream_st*;

struct cudaDeviceProp {
  int major = 0, minor = 0, multiProcessorCount = 0;
};

// The version of CUDA of the LibTorch that scripts/bootstrap.sh installs.
#define CUDART_VERSION 13000
