#pragma once

// What each module of a model's sequence costs: for splits into stages that take the same time.

#include <vector>

#include <c10/core/Device.h>

#include "job/job_config.h"
#include "titan/parallel/pipeline_split.h"

namespace titan::train {

/// What a device does in a second. The defaults are an H100's of bfloat16, at what products reach of its
/// peak; a split depends on their ratio only.
struct DeviceSpeed {
  double flops = 500e12;
  double bytes = 2.5e12;
};

/// From sizes alone, of a micro-batch of parallelism.pipeline_parallel_microbatch_size sequences, in the
/// order of the model's nn::LayerSequence: each module is built on meta tensors and run once.
/// - Time: operations / speed + bytes moved / speed. Operations are those of products with parameters (two
/// for each
///   element and token; twice that backwards) and of causal attention; embeddings look up rows, and write a
///   whole gradient matrix; the last module is the loss head, with its loss. Layers that activation
///   checkpointing runs again are charged for it: wholly, every n-th, or half under "op".
/// - Memory: weight, gradient and the optimizer's two moments in training.dtype, shared by the ranks that the
/// parameters
///   are sharded over, and a gathered copy in the compute dtype; what the graph of a forward saves (for
///   layers that are run again in full their input).
/// `dims` divides memory; times are a single device's, as all stages' are divided alike.
std::vector<pipeline::ModuleCost> computed_costs(const JobConfig& config, const ParallelDims& dims = {},
                                                 const DeviceSpeed& speed = {});

/// The same with times measured on `device`: each module is built there by itself, whole, and run `repeats`
/// times, of which the fastest counts. Modules of equal shape are measured once. Other ranks measure other
/// times: whoever splits by them has to spread one rank's.
std::vector<pipeline::ModuleCost> measured_costs(const JobConfig& config, at::Device device,
                                                 const ParallelDims& dims = {}, int repeats = 3);

}  // namespace titan::train
