#pragma once

// titan::adam_ on a GPU: a function that launches the kernel in adam_kernels.cu, which doesn't use LibTorch. It returns at once; device memory
// must stay valid until the stream has run the kernel.

#include <cstdint>

#include <cuda_runtime_api.h>

#include "cuda_plugin/source.h"
#include "ops/adam_formula.h"

namespace titan::ops::cuda {

/// Parameters of one dtype, with states of one dtype. They travel as the kernel's argument, which may have 4 KiB, so a launch updates many
/// parameters and reads no table from memory.
struct AdamTensors {
  static constexpr int kMaxTensors = 36;
  struct Tensor {
    void* param;
    const void* grad;
    void *exp_avg, *exp_avg_sq;
    const float* step;
    int64_t count;
    adam::Place place;
  };
  Tensor tensors[kMaxTensors];
  int first_block[kMaxTensors];  ///< filled in by the launch
  int num_tensors;
};
static_assert(sizeof(AdamTensors) <= 4000);

/// The dtypes of gradients and parameters, and of states.
struct AdamSources {
  titan::cuda::Source param, state;
};

/// grad_factor: null, or multiplies the gradients, which aren't written. skip: null, or if it is 1, nothing changes. lr: null, or takes the place of
/// the rule's.
void launch_adam(AdamTensors in, AdamSources sources, const adam::Rule& rule, const double* grad_factor,
                 const float* skip, const float* lr, cudaStream_t stream);

}  // namespace titan::ops::cuda
