#pragma once

// Float8 and MXFP8 in a job: conversion of linear layers, and delayed scales.

#include <memory>
#include <optional>
#include <string>

#include "job/job_config.h"
#include "titan/float8/convert.h"
#include "titan/ops/linear.h"
#include "titan/train/trainer.h"

namespace titan::train {

struct Gpu {
  std::string name;
  int compute_capability = 0;  ///< 90: 9.0
};

/// A table of the configuration that converts linear layers.
struct ConverterKeys {
  const char* converter = "";  ///< its name in model.converters
  const char* emulate = "";    ///< the key that does without units
};

/// How the products of `recipe` run on `gpu`, or on a CPU (nullopt). Throws ConfigError where it has no units
/// for them, unless they are emulated.
float8::Arithmetic choose_arithmetic(const float8::Recipe& recipe, const std::optional<Gpu>& gpu,
                                     bool emulate, const ConverterKeys& keys);

}  // namespace titan::train

namespace torch::nn {
class Module;
}

namespace titan::train {

/// If model.converters asks for Float8 or MXFP8: gives the model's linear layers its products. Throws
/// ConfigError on a device without units for it, unless they are emulated. `plain`: of what stays in high
/// precision.
void convert_to_float8(const JobConfig& config, at::Device device, torch::nn::Module& model,
                       const std::shared_ptr<const ops::Products>& plain);

/// Logs which layers of the whole model run in Float8 and why the others don't, and warns of filters that
/// name none. Called by one rank.
void log_float8_layers(const JobConfig& config);

/// Called after the plan. Throws ConfigError if tensor parallelism leaves parts that can't be multiplied.
void check_float8_parts(const JobConfig& config, torch::nn::Module& model);

/// The scales of this run that are delayed.
float8::DelayedScaling delayed_scaling(const JobConfig& config);

/// Whether layers that tensor parallelism cuts gather activations in Float8: the recipe casts them once, and
/// there are parts of a sequence to gather.
bool gathers_activations_in_float8(const JobConfig& config);

// Float8's delayed scales in a run: their reduction in each step, and their place in checkpoints.

/// Key of the histories in a checkpoint, which may lack them: a run may change its scaling when it resumes.
inline constexpr const char* kDelayedScales = "float8_scales";

/// Updates the scales before each optimizer step; null if none are delayed. Joins the checkpoints (null:
/// there are none), which may not outlive the result.
std::unique_ptr<TrainerPolicy> build_delayed_scales(
    const JobConfig& config, const std::vector<std::unique_ptr<TrainableModel>>& models, const Meshes& meshes,
    RunCheckpoints* checkpoints);

}  // namespace titan::train
