#include "titan/float8/settings.h"

namespace titan::float8 {

namespace {

// Keys that TorchTitan had while torchao scaled with delay.
void describe_delayed(config::Table<Float8Settings>& table) {
  using Settings = Float8Settings;
  const auto types = config::one_of({"dynamic", "delayed"});
  const char* same = "the same of weights";
  table.field("scaling_type_input", &Settings::scaling_type_input,
              "what the scales of layers' inputs are made of: \"dynamic\", the matrix that is cast; "
              "\"delayed\", the largest magnitudes of the last history_len steps, one reduction a step",
              types);
  table.field("scaling_type_weight", &Settings::scaling_type_weight, same, types);
  table.field("scaling_type_grad_output", &Settings::scaling_type_grad_output,
              "the same of outputs' gradients", types);
  table.field("history_len", &Settings::history_len, "steps that delayed scales remember",
              config::at_least(1));
}

}  // namespace

void describe(config::Table<Float8Settings>& table) {
  using Settings = Float8Settings;
  table.field(
      "recipe_name", &Settings::recipe_name,
      "what the products multiply: \"tensorwise\" (as when unset), \"rowwise\", \"rowwise_with_gw_hp\", "
      "or one that was registered (docs/float8.md)");
  table.field(
      "filter_fqns", &Settings::filter_fqns,
      "linear layers whose name contains one of these stay in high precision; \"auto_filter_small_kn\" "
      "leaves out those that are too small to gain");
  table.field(
      "emulate", &Settings::emulate,
      "the same numbers without Float8 hardware, slower than high precision: for CPUs, older GPUs, tests");
  table.field("enable_fsdp_float8_all_gather", &Settings::enable_fsdp_float8_all_gather,
              "weights travel as the bytes that the products multiply; for recipes that cast a weight in one "
              "way, with one scale, as \"tensorwise\"");
  table.field("precompute_float8_dynamic_scale_for_fsdp", &Settings::precompute_float8_dynamic_scale_for_fsdp,
              "all weights' scales in one reduction a step, not each group's before its gather; takes "
              "enable_fsdp_float8_all_gather");
  describe_delayed(table);
}

DelayedScaling Float8Settings::delayed() const {
  return {.input = scaling_type_input == "delayed",
          .weight = scaling_type_weight == "delayed",
          .grad_output = scaling_type_grad_output == "delayed",
          .history_len = history_len};
}

void describe(config::Table<MxSettings>& table) {
  table.field("recipe_name", &MxSettings::recipe_name,
              "how the scales of blocks are rounded: \"mxfp8_cublas\", down; \"mxfp8_cublas_rceil\", up; "
              "\"mxfp8_emulated\", as the first with emulate; or one that was registered (docs/float8.md)");
  table.field("mxfp8_dim1_cast_kernel_choice", &MxSettings::mxfp8_dim1_cast_kernel_choice,
              "what casts down columns: \"triton\" and \"cuda\", the device's kernel; \"torch\", LibTorch's "
              "operations; the same numbers",
              config::one_of({"triton", "cuda", "torch"}));
  table.field("filter_fqns", &MxSettings::filter_fqns,
              "linear layers whose name contains one of these stay in high precision");
  table.field("emulate", &MxSettings::emulate,
              "the same numbers on any device, slower than high precision: the hardware's product takes "
              "compute capability 10.0");
}

void describe(config::Table<QuantizeSettings>& table) {
  using config::StringList;
  using std::string;
  const char* on = "model.converters";
  const char* grouped = "there is no mixture of experts";
  table.table("linear.float8", &QuantizeSettings::float8);
  table.table("linear.mx", &QuantizeSettings::mx);
  // Here, as they hang on a key of another table.
  table.refused("grouped_mm.float8.fqns", StringList{}, grouped, on);
  table.refused("grouped_mm.mx.recipe_name", string("mxfp8"), grouped, on, config::one_of({"mxfp8"}));
  table.refused("grouped_mm.mx.fqns", StringList{}, grouped, on);
}

}  // namespace titan::float8
