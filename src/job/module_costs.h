#pragma once

// What each module of a model's sequence costs in time and memory, for balanced pipeline stages.

#include <vector>

#include <c10/core/Device.h>

#include "job/job_config.h"
#include "parallel/pipeline/split.h"

namespace titan::train {

/// What a device does per second. The defaults are what bfloat16 matrix products reach on an H100; a split
/// depends only on their ratio.
struct DeviceSpeed {
  double flops = 500e12;
  double bytes = 2.5e12;
};

/// Computed from sizes, for a micro-batch of parallelism.pipeline_parallel_microbatch_size sequences, in the
/// order of the model's nn::LayerSequence: each module is built on meta tensors and run once.
/// - Time: operations / speed + bytes moved / speed. Operations are those of products with parameters (two per
///   element and token; twice that in the backward) and of causal attention. Embeddings look up rows, and
///   write a whole gradient matrix. The last module is the loss head, with its loss. Layers that activation
///   checkpointing recomputes are charged for it: in full, every n-th, or half under "op".
/// - Memory: weight, gradient and the optimizer's two moments in training.dtype, divided by the ranks that the
///   parameters are sharded over, and a gathered copy in the compute dtype; and what the graph of a forward
///   saves (for layers that are recomputed in full, their input).
/// `dims` divides memory. Times are a single device's, as the times of all stages are divided equally.
std::vector<pipeline::ModuleCost> computed_costs(const JobConfig& config, const ParallelDims& dims = {},
                                                 const DeviceSpeed& speed = {});

/// The same with times measured on `device`: each module is built there on its own, unsharded, and run
/// `repeats` times, of which the fastest counts. Modules of equal shape are measured once. Ranks measure
/// different times: to split by them, broadcast one rank's.
std::vector<pipeline::ModuleCost> measured_costs(const JobConfig& config, at::Device device,
                                                 const ParallelDims& dims = {}, int repeats = 3);

}  // namespace titan::train
