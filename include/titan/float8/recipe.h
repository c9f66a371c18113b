#pragma once

// A recipe says what a linear layer's three products multiply: which dtype each side is cast to, and what
// shares a scale. It is a value; all that reads one is written once (float8/products.h). A recipe of one's
// own: docs/examples/custom_float8/rowwise_e5m2.cpp.

#include <optional>
#include <string>

#include <c10/core/ScalarType.h>

#include "titan/config/table.h"
#include "titan/core/registry.h"

namespace titan::float8 {

/// What has a scale of its own.
enum class Granularity {
  Matrix,  ///< the whole matrix ("tensorwise"); with tensor parallelism the parts on all ranks
  Vector,  ///< each vector that the product sums over: rows, or columns ("rowwise")
  Block,   ///< each 32 elements of such a vector: MXFP8
};

/// How the scale of a block, a power of two, follows from its largest magnitude.
enum class BlockRounding {
  Down,  ///< the magnitude's exponent (OCP's MX specification): what lies above the last power of two of the
         ///< format's range may saturate
  Up,    ///< the magnitude over the format's largest value, rounded up (NVIDIA's "rceil"): nothing saturates
};

struct BlockScaling {
  BlockRounding rounding = BlockRounding::Down;
  /// Casts down columns by LibTorch's operations in place of the kernel; the same bits.
  bool composed_columns = false;
};

/// Scales made of the last steps' largest magnitudes, in place of those of the matrix that is cast: they are
/// there before the matrix is, and one reduction a step makes them the same on all ranks
/// (float8/delayed_scales.h). For matrices with one scale each.
struct DelayedScaling {
  bool input = false, weight = false, grad_output = false;
  int64_t history_len = 16;  ///< steps
  bool any() const { return input || weight || grad_output; }
};

/// How one side of a product is cast.
struct Cast {
  at::ScalarType dtype = at::kFloat8_e4m3fn;  ///< or Float8_e5m2: more range, a bit less precision
  Granularity granularity = Granularity::Matrix;
  bool operator==(const Cast&) const = default;
};

/// Both sides of a product, in the order in which the formulas of ops::Products name them.
struct ProductCasts {
  Cast left, right;
  bool fast_accumulation = false;  ///< sums with fewer bits, where the hardware has that; faster
};

/// Products that aren't given stay in high precision.
struct Recipe {
  std::optional<ProductCasts> output;       ///< x W^T
  std::optional<ProductCasts> grad_input;   ///< g W
  std::optional<ProductCasts> grad_weight;  ///< g^T x
  /// Scales are rounded down to powers of two, so that scaling itself rounds nothing.
  bool power_of_two_scales = false;
  BlockScaling blocks = {};     ///< of what has Granularity::Block
  DelayedScaling delayed = {};  ///< of what has Granularity::Matrix
};

/// By the names of quantize.linear.float8.recipe_name: "tensorwise", "rowwise", "rowwise_with_gw_hp", and of
/// quantize.linear.mx.recipe_name: "mxfp8_cublas", "mxfp8_cublas_rceil", "mxfp8_emulated", as in torchao; and
/// what users add.
Registry<Recipe>& recipes();

/// Whether both products of the weight cast it in the same way, with one scale: so it may be cast before it
/// is gathered.
bool casts_weight_once(const Recipe& recipe);
/// The same of x and of g, where tensor parallelism gathers their rows.
bool casts_input_once(const Recipe& recipe);
bool casts_grad_once(const Recipe& recipe);

/// Whether any of its matrices has scales for blocks: MXFP8, [quantize.linear.mx].
bool scales_blocks(const Recipe& recipe);

/// The compute capability (89: 8.9) from which on GPUs have units for its products.
int first_capability(const Recipe& recipe);

/// Throws ConfigError where `recipe` casts to something else than Float8, multiplies e5m2 by e5m2 or blocks
/// by something else, or delays scales of parts of a matrix.
void check(const std::string& name, const Recipe& recipe);

/// The names of the rewrites in model.converters.
inline constexpr const char* kConverter = "quantize.linear.float8";
inline constexpr const char* kMxConverter = "quantize.linear.mx";

/// [quantize.linear.float8]; read where model.converters names it.
struct Float8Settings {
  std::optional<std::string> recipe_name;  ///< unset: "tensorwise"
  config::StringList filter_fqns;
  bool emulate = false;
  bool enable_fsdp_float8_all_gather = false;
  bool precompute_float8_dynamic_scale_for_fsdp = false;

  std::string scaling_type_input = "dynamic";  ///< or "delayed"
  std::string scaling_type_weight = "dynamic";
  std::string scaling_type_grad_output = "dynamic";
  int64_t history_len = 16;  ///< steps that delayed scales remember

  std::string recipe() const { return recipe_name.value_or("tensorwise"); }
  DelayedScaling delayed() const;
};

/// [quantize.linear.mx]; read where model.converters names it.
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
