#pragma once

#include <memory>

#include "titan/ops/products.h"
#include "titan/train/job_config.h"

namespace torch::nn {
class Module;
}

namespace titan::train {

/// If model.converters asks for Float8 or MXFP8: gives the model's linear layers its products. Throws
/// ConfigError on a device without units for it, unless they are emulated. `plain`: of what stays in high
/// precision.
void convert_to_float8(const JobConfig& config, at::Device device, torch::nn::Module& model,
                       const std::shared_ptr<const ops::Products>& plain);

/// Of the whole model, whatever of it is on this rank: logs which layers run in Float8 and why the others
/// don't, and warns of filters that name none. For one rank.
void log_float8_layers(const JobConfig& config);

/// After the plan: throws ConfigError where tensor parallelism leaves parts that can't be multiplied.
void check_float8_parts(const JobConfig& config, torch::nn::Module& model);

/// Which scales of this run are delayed.
float8::DelayedScaling delayed_scaling(const JobConfig& config);

/// Whether layers that tensor parallelism cuts gather activations in Float8: the recipe casts them once, and
/// there are parts of a sequence to gather.
bool gathers_activations_in_float8(const JobConfig& config);

}  // namespace titan::train
