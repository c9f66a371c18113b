#pragma once

#include <optional>
#include <string>

#include "titan/config/table.h"
#include "titan/float8/recipe.h"

namespace titan::float8 {

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
