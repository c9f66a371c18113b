#pragma once

// The products of a linear layer in Float8, which convert() gives to layers and FSDP queries.

#include <memory>
#include <optional>

#include "titan/float8/convert.h"

namespace titan::float8 {

/// The products of a linear layer by `recipe`. `plain` computes the products that the recipe leaves out, and
/// those of the emulation. Thread-safe, except with delayed scales. They keep the scales of the last weight,
/// so each layer should have its own products, made by for_parts() of the same products. Casts are stored in
/// ops::Operand: input() keeps for the backward the form that the recipe's weight gradient reads, with one
/// byte per element if it is Float8.
///
/// [Note: one scale over ranks] In a layer of parts (ops::SpreadFeatures), the scale of a matrix, and of
/// vectors that are spread over ranks, is computed from the largest magnitude on all ranks, so that the parts
/// have the same values as on one rank. This takes one small all-gather per scale.
///
/// gather.in_float8 requires a recipe that casts a weight once (casts_weight_once). With delayed scales the
/// products belong to one layer, whose magnitudes they record once DelayedScales has collected them.
std::shared_ptr<const ops::Products> products(Recipe recipe, Arithmetic arithmetic,
                                              std::shared_ptr<const ops::Products> plain,
                                              const GatherOptions& gather = {});

/// How a layer with these products computes.
struct Float8Layer {
  std::shared_ptr<const Recipe> recipe;
  Arithmetic arithmetic;
  std::shared_ptr<LayerScales> scales;  ///< the histories; null without delayed scales
};

/// Nullopt if the products aren't Float8.
std::optional<Float8Layer> float8_layer(const ops::Products& products);

/// How a weight is cast before it is gathered.
struct WeightGather {
  at::ScalarType dtype = at::kFloat8_e4m3fn;
  bool scales_at_once = false;
  bool power_of_two_scales = false;
  std::shared_ptr<const ops::RankParts> parts;  ///< ranks that share the scale; null: the weight is whole
};

/// How to gather a weight that these products multiply; nullopt without GatherOptions::in_float8.
std::optional<WeightGather> weight_gather(const ops::Products& products);

// ---- one product of two matrices in 8 bits

struct ScaledProductOptions {
  at::ScalarType out_dtype = at::kFloat;
  bool fast_accumulation = false;
  bool power_of_two_scales = false;
};

/// a b^T by at::_scaled_mm, summed in fp32. a: [N, K], b: [M, K]; K is padded with zeros to a multiple of 16.
/// Matrices in blocks need compute capability 10.0.
at::Tensor hardware_product(const ops::ScaledMatrix& a_NK, const ops::ScaledMatrix& b_MK,
                            const ScaledProductOptions& options);

/// The same into out [N, M], contiguous.
void put_hardware_product(const at::Tensor& out_NM, const ops::ScaledMatrix& a_NK,
                          const ops::ScaledMatrix& b_MK, const ScaledProductOptions& options);

/// out += the same product, also for blocks. On GPUs it adds itself where it can (put_product in float8/cast.h), without a tensor of its own.
void add_hardware_product(const at::Tensor& out_NM, const ops::ScaledMatrix& a_NK,
                          const ops::ScaledMatrix& b_MK, const ScaledProductOptions& options);

/// a b^T from the values in fp32; it differs from the hardware only in fp32 rounding.
at::Tensor emulated_product(const ops::Products& plain, const ops::ScaledMatrix& a_NK,
                            const ops::ScaledMatrix& b_MK, const ScaledProductOptions& options);

}  // namespace titan::float8
