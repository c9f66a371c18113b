#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/float8/recipe.h"
#include "titan/ops/products.h"

namespace titan::float8 {

/// How the products of 8-bit matrices run.
enum class Arithmetic {
  Hardware,  ///< at::_scaled_mm: SM 8.9 and later
  Emulated,  ///< the 8-bit values multiplied in fp32, for any device
};

/// How fully_shard gathers the weights, on more than one rank; in Float8 it doesn't go with cpu_offload.
struct GatherOptions {
  /// As the bytes that the products multiply, cast from the shards by the scale of the whole weight.
  bool in_float8 = false;
  /// All weights' scales in one reduction, at the first gather after the shards were written; otherwise each
  /// group's before its gather. (With tensor parallelism always in one.)
  bool scales_at_once = false;
};

/// The products of a linear layer by `recipe`; those that it leaves out, and the emulation's, by `plain`.
/// Thread-safe; the scales of the last weight are kept, so that each layer should have its own: for_parts()
/// of the same products. An operand's casts stand in ops::Operand: input() keeps
/// for the backward what the recipe's weight gradient reads, one byte an element where it reads Float8.
///
/// [Note: one scale over ranks] Of a layer of parts (ops::SpreadFeatures) the scale of a matrix, and of
/// vectors that lie across ranks, is made from the largest magnitude on all ranks, so that the parts hold
/// what one rank would: one small all-gather each.
/// With gather.in_float8 the recipe has to cast a weight once (casts_weight_once).
/// Of a recipe that delays scales the products are one layer's: they remember its magnitudes, once
/// DelayedScales collected them (float8/delayed_scales.h), and are used by one thread at a time.
std::shared_ptr<const ops::Products> products(Recipe recipe, Arithmetic arithmetic,
                                              std::shared_ptr<const ops::Products> plain,
                                              const GatherOptions& gather = {});

/// How these products are computed; none where they aren't of Float8.
std::optional<Arithmetic> arithmetic_of(const ops::Products& products);

/// Whether these are products of a recipe that scales blocks.
bool multiplies_blocks(const ops::Products& products);

/// How a weight lies in Float8 before any product asks for it.
struct WeightGather {
  at::ScalarType dtype = at::kFloat8_e4m3fn;
  bool scales_at_once = false;
  bool power_of_two_scales = false;
  std::shared_ptr<const ops::RankParts> parts;  ///< ranks that share the scale; null: the weight is whole
};

/// Of a weight that these products multiply; none where nobody asked for it (GatherOptions).
std::optional<WeightGather> weight_gather(const ops::Products& products);

}  // namespace titan::float8

namespace torch::nn {

// Delayed scaling: a matrix's scale is made of the largest magnitudes that the same matrix had in the last
// steps (Micikevicius et al., "FP8 Formats for Deep Learning"; torchao's and Transformer Engine's recipe).
//
// [Note: delayed scales] Each layer has three histories: of its input, its weight, and its output's gradient.
// A cast reads the largest value of its history and notes its own magnitude as pending; just before the
// optimizer's step update() makes the pending ones those of all ranks, in one reduction for all layers, and
// moves them into the histories. Nothing waits for the device. What differs from dynamic scales:
//   - within a step a scale is the same on all ranks and in all micro-batches, without a collective a cast;
//   - a matrix that outgrows its history saturates in that step;
//   - before the first update(), and as long as a history holds zeros alone, a cast is dynamic.
// A matrix that isn't finite gets a NaN scale (saturation would hide an infinity), and isn't remembered.

class Module;
}  // namespace torch::nn

namespace titan::float8 {

/// What a cast reads and writes of its history: scalars, fp32. Undefined until somebody collects them.
struct DelayedScale {
  at::Tensor largest;  ///< of the history; 0: there is none
  at::Tensor pending;  ///< of this step so far
  bool defined() const { return largest.defined(); }
};

/// Of a linear layer. `ready`: update() has been called, so ranks agree.
struct LayerScales {
  DelayedScale input, weight, grad_output;
  bool ready = false;
};

/// amax [] to its scale [] (float8/cast.h), by `history`; notes it as pending if `records`.
at::Tensor delayed_scale(const at::Tensor& amax, const DelayedScale& history, at::ScalarType dtype,
                         bool power_of_two, bool records);

/// Of a layer with these products; null where nothing is delayed.
std::shared_ptr<LayerScales> layer_scales(const ops::Products& products);

/// All layers' histories, side by side.
class DelayedScales {
 public:
  struct Layer {
    std::string fqn;
    std::shared_ptr<LayerScales> scales;
  };

  /// Of all linear layers below `roots`, empty histories of `history_len` steps on `device`.
  static DelayedScales collect(const std::vector<torch::nn::Module*>& roots, int64_t history_len,
                               at::Device device);

  bool empty() const { return layers_.empty(); }
  const std::vector<Layer>& layers() const { return layers_; }
  /// [3, history_len] of layer i: input, weight, output's gradient; the newest first. Shares memory.
  at::Tensor history(size_t i) const;

  /// `reduce_max`: makes a tensor the largest of all ranks that have these layers, element by element.
  void update(const std::function<void(const at::Tensor&)>& reduce_max);
  /// The histories were written.
  void loaded();

 private:
  void refresh();

  std::vector<Layer> layers_;
  at::Tensor history_;            // [3 layers, history_len]
  at::Tensor largest_, pending_;  // [3 layers]
};

}  // namespace titan::float8

namespace torch::nn {

// Which linear layers of a model run in Float8.

class Module;
}  // namespace torch::nn

namespace titan::float8 {

/// In a list of filters: leaves out layers that are too small to gain, by torchao's measurements on an H100.
inline constexpr const char* kAutoFilter = "auto_filter_small_kn";

struct ConvertOptions {
  std::string recipe_name = "tensorwise";
  std::vector<std::string> filter_fqns;  ///< parts of names, and perhaps kAutoFilter
  Arithmetic arithmetic = Arithmetic::Hardware;
  std::shared_ptr<const ops::Products> plain = nullptr;  ///< of products that stay in high precision
  DelayedScaling delayed = {};                           ///< in place of the recipe's, if any is
  bool composed_block_columns = false;                   ///< BlockScaling::composed_columns
  GatherOptions gather = {};                             ///< in_float8: for recipes that cast a weight once
};

/// A layer that multiplies by a weight, and why it stays in high precision; "": it runs in Float8.
struct LayerChoice {
  std::string fqn;
  std::string reason;
};

/// Gives the nn::Linear layers below `root` the recipe's products, but for those that a filter names or whose
/// sizes aren't multiples of 16 (of 32 for blocks). Before parallelize(): sizes are those of whole weights.
/// Throws ConfigError for an unknown recipe, and for kAutoFilter where it has no thresholds.
std::vector<LayerChoice> convert(torch::nn::Module& root, const ConvertOptions& options);

/// Of `filter_fqns`, those that are part of no layer's name.
std::vector<std::string> idle_filters(const std::vector<LayerChoice>& choices,
                                      const std::vector<std::string>& filter_fqns);

/// After parallelize(): a line for each layer below `root` whose part the hardware can't multiply in Float8,
/// since its sizes aren't multiples of 16, whose blocks of 32 are cut, or that is left without rows on a
/// rank.
std::vector<std::string> unfit_parts(torch::nn::Module& root);

/// The recipe of these options. Throws ConfigError as check() does.
Recipe recipe_of(const ConvertOptions& options);

/// "Float8 (rowwise): 12 of 43 linear layers; in high precision: ...", with one part for each reason, layers
/// of a number summed up as "layers.*"; "MXFP8 (mxfp8_cublas): ..." for recipes of blocks.
std::string summary(const std::string& recipe_name, const std::vector<LayerChoice>& choices);

/// Throws ConfigError where the recipe is unknown or the filters ask for what it has no thresholds for.
void check_filters(const std::string& recipe_name, const std::vector<std::string>& filter_fqns);

}  // namespace titan::float8
