#include "titan/float8/recipe.h"

#include <algorithm>
#include <vector>

namespace titan::float8 {

namespace {

constexpr Cast kMatrix{};
constexpr Cast kVectors{.granularity = Granularity::Vector};
constexpr Cast kWideMatrix{.dtype = at::kFloat8_e5m2};
constexpr Cast kBlocks{.granularity = Granularity::Block};

void add_torchao_recipes(Registry<Recipe>& registry) {
  registry.add("tensorwise", {.output = ProductCasts{kMatrix, kMatrix, /*fast_accumulation=*/true},
                              .grad_input = ProductCasts{kWideMatrix, kMatrix},
                              .grad_weight = ProductCasts{kWideMatrix, kMatrix}});
  // With a scale per vector, gradients don't need a wider range.
  registry.add("rowwise", {.output = ProductCasts{kVectors, kVectors, /*fast_accumulation=*/true},
                           .grad_input = ProductCasts{kVectors, kVectors},
                           .grad_weight = ProductCasts{kVectors, kVectors},
                           .power_of_two_scales = true});
  // With the weight's gradient in high precision, x and g are cast only along their rows.
  registry.add("rowwise_with_gw_hp", {.output = ProductCasts{kVectors, kVectors, /*fast_accumulation=*/true},
                                      .grad_input = ProductCasts{kVectors, kMatrix},
                                      .grad_weight = std::nullopt,
                                      .power_of_two_scales = true});
}

// The 32 elements of a block are close enough to each other for e4m3 everywhere.
void add_mx_recipes(Registry<Recipe>& registry) {
  Recipe recipe{.output = ProductCasts{kBlocks, kBlocks},
                .grad_input = ProductCasts{kBlocks, kBlocks},
                .grad_weight = ProductCasts{kBlocks, kBlocks}};
  registry.add("mxfp8_cublas", recipe);
  registry.add("mxfp8_emulated", recipe);
  recipe.blocks.rounding = BlockRounding::Up;
  registry.add("mxfp8_cublas_rceil", recipe);
}

bool is_float8(at::ScalarType dtype) { return dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2; }
bool is_matrix(const Cast& cast) { return cast.granularity == Granularity::Matrix; }
bool is_block(const Cast& cast) { return cast.granularity == Granularity::Block; }
bool is_one_cast(const Cast& a, const Cast& b) { return a == b && is_matrix(a); }

std::vector<ProductCasts> products_of(const Recipe& recipe) {
  std::vector<ProductCasts> products;
  for (const auto* product : {&recipe.output, &recipe.grad_input, &recipe.grad_weight})
    if (*product) products.push_back(**product);
  return products;
}

// TorchTitan had these keys when torchao had delayed scaling.
void describe_delayed(config::Table<Float8Settings>& table) {
  using Settings = Float8Settings;
  const auto types = config::one_of({"dynamic", "delayed"});
  const char* same = "the same for weights";
  table.field("scaling_type_input", &Settings::scaling_type_input,
              "what the scales of layers' inputs are made from: \"dynamic\", the matrix that is cast; "
              "\"delayed\", the largest magnitudes of the last history_len steps, one reduction a step",
              types);
  table.field("scaling_type_weight", &Settings::scaling_type_weight, same, types);
  table.field("scaling_type_grad_output", &Settings::scaling_type_grad_output,
              "the same for outputs' gradients", types);
  table.field("history_len", &Settings::history_len, "steps that delayed scales remember",
              config::at_least(1));
}

}  // namespace

Registry<Recipe>& recipes() {
  static Registry<Recipe>& registry = *[] {
    auto* made = new Registry<Recipe>("Float8 recipe");
    add_torchao_recipes(*made);
    add_mx_recipes(*made);
    return made;
  }();
  return registry;
}

bool casts_weight_once(const Recipe& recipe) {
  return recipe.output && recipe.grad_input && is_one_cast(recipe.output->right, recipe.grad_input->right);
}
bool casts_input_once(const Recipe& recipe) {
  return recipe.output && recipe.grad_weight && is_one_cast(recipe.output->left, recipe.grad_weight->right);
}
bool casts_grad_once(const Recipe& recipe) {
  return recipe.grad_input && recipe.grad_weight &&
         is_one_cast(recipe.grad_input->left, recipe.grad_weight->left);
}

bool scales_blocks(const Recipe& recipe) {
  const std::vector<ProductCasts> products = products_of(recipe);
  return std::any_of(products.begin(), products.end(), [](const ProductCasts& product) {
    return is_block(product.left) || is_block(product.right);
  });
}

// Scales for vectors need the same hardware as scales for matrices: at::_scaled_mm has kernels for them, or
// they are applied after the product (hardware_product in products.cpp).
int first_capability(const Recipe& recipe) { return scales_blocks(recipe) ? 100 : 89; }

void check(const std::string& name, const Recipe& recipe) {
  const auto expect = [&name](bool holds, const auto&... message) {
    if (!holds) throw ConfigError(titan::str("Float8 recipe '", name, "' ", message...));
  };
  for (const auto& [left, right, fast] : products_of(recipe)) {
    expect(is_block(left) == is_block(right),
           "scales blocks on only one side of a product; both sides must scale blocks, or neither");
    expect(!recipe.delayed.any() || (is_matrix(left) && is_matrix(right)),
           "scales parts of a matrix, but a delayed scale is for a whole matrix; set scaling_type_* = "
           "\"dynamic\", or use \"tensorwise\"");
    for (const Cast& cast : {left, right})
      expect(is_float8(cast.dtype), "casts to ", cast.dtype, "; allowed: Float8_e4m3fn, Float8_e5m2");
    expect(
        left.dtype != at::kFloat8_e5m2 || right.dtype != at::kFloat8_e5m2,
        "multiplies Float8_e5m2 by Float8_e5m2, which no hardware supports; one side must be Float8_e4m3fn");
  }
}

void describe(config::Table<Float8Settings>& table) {
  using Settings = Float8Settings;
  table.field(
      "recipe_name", &Settings::recipe_name,
      "what the products multiply: \"tensorwise\" (also when unset), \"rowwise\", \"rowwise_with_gw_hp\", "
      "or one that was registered (docs/float8.md)");
  table.field(
      "filter_fqns", &Settings::filter_fqns,
      "linear layers whose name contains one of these stay in high precision; \"auto_filter_small_kn\" "
      "leaves out layers that are too small to gain");
  table.field(
      "emulate", &Settings::emulate,
      "the same numbers without Float8 hardware, slower than high precision: for CPUs, older GPUs, tests");
  table.field("enable_fsdp_float8_all_gather", &Settings::enable_fsdp_float8_all_gather,
              "gather weights as the bytes that the products multiply; needs a recipe that casts a weight in "
              "one way, with one scale, such as \"tensorwise\"");
  table.field("precompute_float8_dynamic_scale_for_fsdp", &Settings::precompute_float8_dynamic_scale_for_fsdp,
              "find all weights' scales in one reduction a step instead of one for each group; needs "
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
              "what casts columns: \"triton\" and \"cuda\", the device's kernel; \"torch\", LibTorch's "
              "operations; the same numbers",
              config::one_of({"triton", "cuda", "torch"}));
  table.field("filter_fqns", &MxSettings::filter_fqns,
              "linear layers whose name contains one of these stay in high precision");
  table.field("emulate", &MxSettings::emulate,
              "the same numbers on any device, slower than high precision; the hardware's product needs "
              "compute capability 10.0");
}

void describe(config::Table<QuantizeSettings>& table) {
  using config::StringList;
  using std::string;
  const char* on = "model.converters";
  const char* grouped = "there is no mixture of experts";
  table.table("linear.float8", &QuantizeSettings::float8);
  table.table("linear.mx", &QuantizeSettings::mx);
  // Refused here because they depend on a key of another table.
  table.refused("grouped_mm.float8.fqns", StringList{}, grouped, on);
  table.refused("grouped_mm.mx.recipe_name", string("mxfp8"), grouped, on, config::one_of({"mxfp8"}));
  table.refused("grouped_mm.mx.fqns", StringList{}, grouped, on);
}

}  // namespace titan::float8
