#pragma once

// Which linear layers of a model run in Float8.

#include <memory>
#include <string>
#include <vector>

#include "titan/float8/products.h"

namespace torch::nn {
class Module;
}

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
