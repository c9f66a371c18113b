#pragma once

// Float8 in a model: converting its linear layers, and the histories of delayed scales.
//
//   const auto plain = titan::ops::default_products();
//   titan::float8::convert(*model.ptr(), {.recipe_name = "rowwise", .plain = plain});
//   titan::fully_shard(model, fsdp);  // parallelize as usual
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

/// How fully_shard gathers weights if there are several ranks. Gathering in Float8 doesn't work with
/// cpu_offload.
struct GatherOptions {
  /// Gather the 8-bit values that the products multiply, cast from the shards with the scale of the whole
  /// weight.
  bool in_float8 = false;
  /// Find all weights' scales in one reduction, at the first gather after the shards changed. Otherwise each
  /// group finds its own before its gather. (With tensor parallelism there is always one reduction.)
  bool scales_at_once = false;
};

/// An entry for filter_fqns that leaves out layers too small to gain, by torchao's measurements on an H100.
inline constexpr const char* kAutoFilter = "auto_filter_small_kn";

struct ConvertOptions {
  std::string recipe_name = "tensorwise";
  std::vector<std::string> filter_fqns;  ///< parts of layers' names, and possibly kAutoFilter
  Arithmetic arithmetic = Arithmetic::Hardware;
  std::shared_ptr<const ops::Products> plain = nullptr;  ///< computes products that stay in high precision
  DelayedScaling delayed = {};                           ///< replaces the recipe's setting if any is true
  bool composed_block_columns = false;                   ///< BlockScaling::composed_columns
  GatherOptions gather = {};                             ///< in_float8: for recipes that cast a weight once
};

/// A layer that multiplies by a weight, and the reason why it stays in high precision; "" if it runs in
/// Float8.
struct LayerChoice {
  std::string fqn;
  std::string reason;
};

/// Gives the nn::Linear layers below `root` the recipe's products, except layers that a filter names or whose
/// sizes aren't multiples of 16 (32 for blocks). Call it before parallelize(), because it checks the sizes of
/// whole weights. Throws ConfigError for an unknown recipe, and for kAutoFilter if the recipe has no
/// thresholds.
std::vector<LayerChoice> convert(torch::nn::Module& root, const ConvertOptions& options);

/// The entries of `filter_fqns` that match no layer.
std::vector<std::string> idle_filters(const std::vector<LayerChoice>& choices,
                                      const std::vector<std::string>& filter_fqns);

/// Call it after parallelize(). Returns a line for each layer below `root` whose part the hardware can't
/// multiply in Float8, because its sizes aren't multiples of 16, because blocks of 32 are cut, or because a
/// rank has no rows.
std::vector<std::string> unfit_parts(torch::nn::Module& root);

/// The recipe of these options. Throws ConfigError as check() does.
Recipe recipe_of(const ConvertOptions& options);

/// "Float8 (rowwise): 12 of 43 linear layers; in high precision: ...", with one entry per reason and numbered
/// layers merged as "layers.*". "MXFP8 (mxfp8_cublas): ..." for recipes with blocks.
std::string summary(const std::string& recipe_name, const std::vector<LayerChoice>& choices);

/// Throws ConfigError if the recipe is unknown or has no thresholds for a filter.
void check_filters(const std::string& recipe_name, const std::vector<std::string>& filter_fqns);

// ---- delayed scales

// [Note: delayed scales] A matrix's scale is computed from the largest magnitudes that the same matrix had in
// the last steps (Micikevicius et al., "FP8 Formats for Deep Learning"; the recipe of torchao and Transformer
// Engine). Each layer has three histories: for its input, its weight, and its output's gradient. A cast reads
// the largest value of its history and records its own magnitude as pending. Just before the optimizer's
// step, update() reduces the pending magnitudes over all ranks, once for all layers, and moves them into the
// histories. Nothing waits for the device. The differences from dynamic scales:
//   - within a step, a scale is the same on all ranks and in all micro-batches, without a collective for each
//     cast;
//   - a matrix whose magnitudes exceed its history saturates in that step;
//   - before the first update(), and as long as a history has only zeros, a cast is dynamic.
// A matrix that isn't finite gets a NaN scale (saturation would hide an infinity), and isn't recorded.

/// The values of a history that a cast reads and writes: fp32 scalars. Undefined until DelayedScales collects
/// them.
struct DelayedScale {
  at::Tensor largest;  ///< the history's maximum; 0: no history yet
  at::Tensor pending;  ///< the largest magnitude of this step so far
  bool defined() const { return largest.defined(); }
};

/// The histories of a linear layer.
struct LayerScales {
  DelayedScale input, weight, grad_output;
  bool ready = false;  ///< update() has been called, so all ranks have the same histories
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
  /// The histories of layer i, [3, history_len], for input, weight and output's gradient, the newest first.
  /// Shares memory with this object.
  at::Tensor history(size_t i) const;

  /// Moves pending magnitudes into the histories. `reduce_max` replaces a tensor by its elementwise maximum
  /// over all ranks that have these layers.
  void update(const std::function<void(const at::Tensor&)>& reduce_max);
  /// Call it after writing to history() tensors.
  void loaded();

 private:
  std::vector<Layer> layers_;
  at::Tensor history_;            // [3 layers, history_len]
  at::Tensor largest_, pending_;  // [3 layers]
};

}  // namespace titan::float8
