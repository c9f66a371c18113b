#pragma once

// Float8 recipes, and the settings that name them. A recipe is a value. For each of a linear layer's three
// products it says to which dtype each side is cast, and which elements share a scale.
//
//   titan::float8::recipes().add("mine", {.output = ProductCasts{kRows, kRows}});
//
// docs/examples/custom_float8/rowwise_e5m2.cpp registers one.

#include <optional>
#include <string>

#include <c10/core/ScalarType.h>

#include "titan/config/table.h"
#include "titan/core/registry.h"

namespace titan::float8 {

/// The elements that share a scale.
enum class Granularity {
  Matrix,  ///< the whole matrix ("tensorwise"); with tensor parallelism, the parts on all ranks
  Vector,  ///< each vector that the product sums over: rows, or columns ("rowwise")
  Block,   ///< 32 elements of such a vector: MXFP8
};

/// How a block's scale, a power of two, is computed from its largest magnitude.
enum class BlockRounding {
  /// From the magnitude's exponent (OCP's MX specification). Values above the last power of two in the
  /// format's range may saturate.
  Down,
  /// From magnitude / the format's largest value, rounded up (NVIDIA's "rceil"). Nothing saturates.
  Up,
};

struct BlockScaling {
  BlockRounding rounding = BlockRounding::Down;
  /// Cast columns with LibTorch's operations instead of the kernel; the results have the same bits.
  bool composed_columns = false;
};

/// Which matrices have scales computed from the largest magnitudes of the last steps, not from the matrix
/// being cast ([Note: delayed scales] in convert.h). Only for matrices with one scale each.
struct DelayedScaling {
  bool input = false, weight = false, grad_output = false;
  int64_t history_len = 16;  ///< number of steps
  bool any() const { return input || weight || grad_output; }
};

/// How one side of a product is cast.
struct Cast {
  at::ScalarType dtype = at::kFloat8_e4m3fn;  ///< or Float8_e5m2: more range, one bit less precision
  Granularity granularity = Granularity::Matrix;
  bool operator==(const Cast&) const = default;
};

/// Both sides of a product, in the order of the formulas in ops::Products.
struct ProductCasts {
  Cast left, right;
  bool fast_accumulation = false;  ///< sum with fewer bits if the hardware can, which is faster
};

/// A recipe. Products that aren't set stay in high precision.
struct Recipe {
  std::optional<ProductCasts> output;       ///< x W^T
  std::optional<ProductCasts> grad_input;   ///< g W
  std::optional<ProductCasts> grad_weight;  ///< g^T x
  /// Round scales down to powers of two, so that scaling itself is exact.
  bool power_of_two_scales = false;
  BlockScaling blocks = {};     ///< for Granularity::Block
  DelayedScaling delayed = {};  ///< for Granularity::Matrix
};

/// The values of quantize.linear.float8.recipe_name ("tensorwise", "rowwise", "rowwise_with_gw_hp") and of
/// quantize.linear.mx.recipe_name ("mxfp8_cublas", "mxfp8_cublas_rceil", "mxfp8_emulated"), as in torchao,
/// and recipes that users add.
Registry<Recipe>& recipes();

/// Whether both products with the weight cast it in the same way, with one scale, so that it can be cast
/// before it is gathered.
bool casts_weight_once(const Recipe& recipe);
/// The same for x and g, whose rows tensor parallelism gathers.
bool casts_input_once(const Recipe& recipe);
bool casts_grad_once(const Recipe& recipe);

/// Whether the recipe has scales for blocks (MXFP8, in [quantize.linear.mx]).
bool scales_blocks(const Recipe& recipe);

/// The lowest compute capability of GPUs that can run the recipe's products; 89 means 8.9.
int first_capability(const Recipe& recipe);

/// Throws ConfigError if `recipe` casts to a dtype that isn't Float8, multiplies e5m2 by e5m2, multiplies
/// blocks by a side without blocks, or delays scales for parts of a matrix.
void check(const std::string& name, const Recipe& recipe);

/// Values of model.converters.
inline constexpr const char* kConverter = "quantize.linear.float8";
inline constexpr const char* kMxConverter = "quantize.linear.mx";

/// [quantize.linear.float8]; read if model.converters names it.
struct Float8Settings {
  std::optional<std::string> recipe_name;  ///< unset: "tensorwise"
  config::StringList filter_fqns;
  bool emulate = false;
  bool enable_fsdp_float8_all_gather = false;
  bool precompute_float8_dynamic_scale_for_fsdp = false;

  std::string scaling_type_input = "dynamic";  ///< or "delayed"
  std::string scaling_type_weight = "dynamic";
  std::string scaling_type_grad_output = "dynamic";
  int64_t history_len = 16;  ///< number of steps in the history of delayed scales

  std::string recipe() const { return recipe_name.value_or("tensorwise"); }
  DelayedScaling delayed() const;
};

/// [quantize.linear.mx]; read if model.converters names it.
struct MxSettings {
  std::string recipe_name = "mxfp8_cublas";
  std::string mxfp8_dim1_cast_kernel_choice = "triton";
  config::StringList filter_fqns = {"output"};
  bool emulate = false;

  bool emulates() const { return emulate || recipe_name == "mxfp8_emulated"; }
};

/// [quantize]
struct QuantizeSettings {
  Float8Settings float8;
  MxSettings mx;
};

void describe(config::Table<Float8Settings>& table);
void describe(config::Table<MxSettings>& table);
void describe(config::Table<QuantizeSettings>& table);

}  // namespace titan::float8
