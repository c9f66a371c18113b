#pragma once

// Float8 in a model: conversion of its linear layers, and the histories of delayed scales.
//
//   titan::float8::convert(*model.ptr(), {.recipe_name = "rowwise", .plain = titan::ops::default_products()});
//   titan::fully_shard(model, fsdp);  // then parallelize as always
//
// With delayed scales, your own loop also calls DelayedScales::update() before each optimizer step.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/float8/recipe.h"
#include "titan/ops/linear.h"

namespace torch::nn {
class Module;
}

namespace titan::float8 {

// ---- conversion

/// How products of 8-bit matrices run.
enum class Arithmetic {
  Hardware,  ///< at::_scaled_mm: SM 8.9 and later
  Emulated,  ///< the 8-bit values multiplied in fp32, on any device
};

/// How fully_shard gathers weights, on more than one rank. Gathering in Float8 doesn't work with cpu_offload.
struct GatherOptions {
  /// As the bytes that the products multiply, cast from the shards by the scale of the whole weight.
  bool in_float8 = false;
  /// Finds all weights' scales in one reduction, at the first gather after the shards changed; otherwise each
  /// group finds its own before its gather. (With tensor parallelism it is always one.)
  bool scales_at_once = false;
};

/// An entry of filter_fqns: leaves out layers that are too small to gain, by torchao's measurements on an H100.
inline constexpr const char* kAutoFilter = "auto_filter_small_kn";

struct ConvertOptions {
  std::string recipe_name = "tensorwise";
  std::vector<std::string> filter_fqns;  ///< parts of names, and perhaps kAutoFilter
  Arithmetic arithmetic = Arithmetic::Hardware;
  std::shared_ptr<const ops::Products> plain = nullptr;  ///< computes products that stay in high precision
  DelayedScaling delayed = {};                           ///< replaces the recipe's, if any is on
  bool composed_block_columns = false;                   ///< BlockScaling::composed_columns
  GatherOptions gather = {};                             ///< in_float8: for recipes that cast a weight once
};

/// A layer that multiplies by a weight, and why it stays in high precision; "": it runs in Float8.
struct LayerChoice {
  std::string fqn;
  std::string reason;
};

/// Gives the nn::Linear layers below `root` the recipe's products, except layers that a filter names or whose
/// sizes aren't multiples of 16 (32 for blocks). Call it before parallelize(): sizes are those of whole
/// weights. Throws ConfigError for an unknown recipe, and for kAutoFilter where it has no thresholds.
std::vector<LayerChoice> convert(torch::nn::Module& root, const ConvertOptions& options);

/// The entries of `filter_fqns` that are part of no layer's name.
std::vector<std::string> idle_filters(const std::vector<LayerChoice>& choices,
                                      const std::vector<std::string>& filter_fqns);

/// After parallelize(): a line for each layer below `root` whose part the hardware can't multiply in Float8,
/// because its sizes aren't multiples of 16, because blocks of 32 are cut, or because a rank has no rows.
std::vector<std::string> unfit_parts(torch::nn::Module& root);

/// The recipe of these options. Throws ConfigError as check() does.
Recipe recipe_of(const ConvertOptions& options);

/// "Float8 (rowwise): 12 of 43 linear layers; in high precision: ...", with one part for each reason, numbered
/// layers merged as "layers.*"; "MXFP8 (mxfp8_cublas): ..." for recipes of blocks.
std::string summary(const std::string& recipe_name, const std::vector<LayerChoice>& choices);

/// Throws ConfigError if the recipe is unknown or has no thresholds for a filter.
void check_filters(const std::string& recipe_name, const std::vector<std::string>& filter_fqns);

// ---- delayed scales

// [Note: delayed scales] A matrix's scale is made from the largest magnitudes that the same matrix had in the
// last steps (Micikevicius et al., "FP8 Formats for Deep Learning"; the recipe of torchao and Transformer
// Engine). Each layer has three histories: of its input, its weight, and its output's gradient. A cast reads
// the largest value of its history and notes its own magnitude as pending. Just before the optimizer's step,
// update() reduces the pending magnitudes over all ranks, once for all layers, and moves them into the
// histories. Nothing waits for the device. The differences from dynamic scales:
//   - within a step, a scale is the same on all ranks and in all micro-batches, without a collective for each
//     cast;
//   - a matrix that outgrows its history saturates in that step;
//   - before the first update(), and as long as a history holds only zeros, a cast is dynamic.
// A matrix that isn't finite gets a NaN scale (saturation would hide an infinity), and isn't remembered.

/// What a cast reads and writes of its history: fp32 scalars. Undefined until DelayedScales collects them.
struct DelayedScale {
  at::Tensor largest;  ///< of the history; 0: there is none
  at::Tensor pending;  ///< the largest magnitude of this step so far
  bool defined() const { return largest.defined(); }
};

/// The histories of a linear layer.
struct LayerScales {
  DelayedScale input, weight, grad_output;
  bool ready = false;  ///< update() has been called, so ranks agree
};

/// The histories of all layers, side by side.
class DelayedScales {
 public:
  struct Layer {
    std::string fqn;
    std::shared_ptr<LayerScales> scales;
  };

  /// Collects all linear layers below `roots`, with empty histories of `history_len` steps on `device`.
  static DelayedScales collect(const std::vector<torch::nn::Module*>& roots, int64_t history_len,
                               at::Device device);

  bool empty() const { return layers_.empty(); }
  const std::vector<Layer>& layers() const { return layers_; }
  /// The histories of layer i, [3, history_len]: input, weight, output's gradient; the newest first. Shares
  /// memory.
  at::Tensor history(size_t i) const;

  /// `reduce_max` replaces a tensor by its elementwise maximum over all ranks that have these layers.
  void update(const std::function<void(const at::Tensor&)>& reduce_max);
  /// To be called after history() tensors were written.
  void loaded();

 private:
  void refresh();

  std::vector<Layer> layers_;
  at::Tensor history_;            // [3 layers, history_len]
  at::Tensor largest_, pending_;  // [3 layers]
};

}  // namespace titan::float8
