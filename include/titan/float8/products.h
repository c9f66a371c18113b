#pragma once

#include <memory>
#include <optional>

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
