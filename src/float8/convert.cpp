#include "titan/float8/convert.h"

#include <algorithm>
#include <map>

#include <torch/nn/module.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "float8/cast.h"
#include "float8/products.h"
#include "titan/nn/layers.h"

namespace titan::float8 {

namespace {

// The number that the hardware requires sizes to be a multiple of.
int64_t multiple_for(const Recipe& recipe) { return scales_blocks(recipe) ? kBlock : 16; }

struct Sizes {
  int64_t in, out;
};

// torchao's thresholds; torchao calls the weight's rows N and its columns K.
bool too_small(const std::string& recipe_name, const Sizes& size) {
  if (recipe_name == "tensorwise") return size.in <= 4096 && size.out <= 1024;
  return size.out <= 2048 || size.in <= 1024 || (size.out <= 4096 && size.in <= 2048);
}

bool auto_filtered(const std::vector<std::string>& filter_fqns) {
  return std::count(filter_fqns.begin(), filter_fqns.end(), kAutoFilter) > 0;
}

std::string why_not(const std::string& fqn, const Sizes& size, const ConvertOptions& options) {
  for (const std::string& part : options.filter_fqns)
    if (part != kAutoFilter && fqn.find(part) != std::string::npos)
      return titan::str("named by filter_fqns (\"", part, "\")");
  const int64_t multiple = multiple_for(recipes().get(options.recipe_name));
  if (size.in % multiple != 0 || size.out % multiple != 0)
    return titan::str(size.in, " to ", size.out, " isn't in multiples of ", multiple);
  if (auto_filtered(options.filter_fqns) && too_small(options.recipe_name, size))
    return titan::str(size.in, " to ", size.out, " is too small to gain (", kAutoFilter, ")");
  return "";
}

// "layers.*.attention.wq" for "layers.12.attention.wq".
std::string pattern_of(const std::string& fqn) {
  std::string pattern;
  for (size_t begin = 0; begin <= fqn.size();) {
    const size_t end = std::min(fqn.find('.', begin), fqn.size());
    const std::string part = fqn.substr(begin, end - begin);
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == std::string::npos;
    pattern += (begin == 0 ? "" : ".") + (number ? "*" : part);
    begin = end + 1;
  }
  return pattern;
}

}  // namespace

void check_filters(const std::string& recipe_name, const std::vector<std::string>& filter_fqns) {
  check(recipe_name, recipes().get(recipe_name));
  const bool known = recipe_name == "tensorwise" || recipe_name == "rowwise";
  if (auto_filtered(filter_fqns) && !known)
    throw ConfigError(titan::str("\"", kAutoFilter,
                                 "\" has thresholds for the recipes tensorwise and rowwise only, not for ",
                                 recipe_name, "; name the layers in filter_fqns"));
}

Recipe recipe_of(const ConvertOptions& options) {
  Recipe recipe = recipes().get(options.recipe_name);
  if (options.delayed.any()) recipe.delayed = options.delayed;
  recipe.blocks.composed_columns = recipe.blocks.composed_columns || options.composed_block_columns;
  check(options.recipe_name, recipe);
  return recipe;
}

std::vector<LayerChoice> convert(torch::nn::Module& root, const ConvertOptions& options) {
  check_filters(options.recipe_name, options.filter_fqns);
  const Recipe recipe = recipe_of(options);
  const auto make = [&] { return products(recipe, options.arithmetic, options.plain, options.gather); };
  // Layers whose products are copies of `first` may share the casts of an input; each keeps its own weight's
  // scales.
  const auto first = make();
  const auto of_layer = [&] { return recipe.delayed.any() ? make() : first->for_parts({}); };
  std::vector<LayerChoice> choices;
  for (const auto& named : root.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
    if (dynamic_cast<nn::LinearCrossEntropyImpl*>(named.value().get())) {
      choices.push_back({named.key(), "the loss head"});
      continue;
    }
    auto* linear = dynamic_cast<nn::LinearImpl*>(named.value().get());
    if (!linear) continue;
    const Sizes size{linear->weight.size(1), linear->weight.size(0)};
    choices.push_back({named.key(), why_not(named.key(), size, options)});
    if (choices.back().reason.empty()) linear->set_products(of_layer());
  }
  return choices;
}

std::vector<std::string> idle_filters(const std::vector<LayerChoice>& choices,
                                      const std::vector<std::string>& filter_fqns) {
  std::vector<std::string> idle;
  for (const std::string& part : filter_fqns) {
    const bool named = std::any_of(choices.begin(), choices.end(), [&](const LayerChoice& choice) {
      return choice.fqn.find(part) != std::string::npos;
    });
    if (part != kAutoFilter && !named) idle.push_back(part);
  }
  return idle;
}

std::vector<std::string> unfit_parts(torch::nn::Module& root) {
  std::vector<std::string> lines;
  for (const auto& named : root.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
    const auto* linear = dynamic_cast<nn::LinearImpl*>(named.value().get());
    const auto layer = linear ? float8_layer(*linear->products()) : std::nullopt;
    if (!layer) continue;
    const int64_t in = linear->weight.size(1), out = linear->weight.size(0);
    const int64_t multiple = multiple_for(*layer->recipe);
    const bool odd = in % multiple != 0 || out % multiple != 0;
    const bool must_fit = scales_blocks(*layer->recipe) || layer->arithmetic == Arithmetic::Hardware;
    if (in == 0 || out == 0 || (odd && must_fit))
      lines.push_back(titan::str(named.key(), ": ", in, " to ", out));
  }
  return lines;
}

std::string summary(const std::string& recipe_name, const std::vector<LayerChoice>& choices) {
  std::map<std::string, std::map<std::string, int64_t>> left_out;  // by reason, then pattern
  int64_t converted = 0;
  for (const LayerChoice& choice : choices) {
    if (choice.reason.empty()) {
      ++converted;
    } else {
      ++left_out[choice.reason][pattern_of(choice.fqn)];
    }
  }
  std::string text = titan::str(scales_blocks(recipes().get(recipe_name)) ? "MXFP8 (" : "Float8 (",
                                recipe_name, "): ", converted, " of ", choices.size(), " linear layers");
  for (const auto& [reason, patterns] : left_out) {
    text += left_out.begin()->first == reason ? "; in high precision: " : "; ";
    int64_t count = 0;
    std::string names;
    for (const auto& [pattern, number] : patterns) {
      count += number;
      names += (names.empty() ? "" : ", ") + pattern;
    }
    text += titan::str(names, count > 1 ? titan::str(" (", count, ")") : "", ": ", reason);
  }
  return text;
}

// ---- delayed scales

DelayedScales DelayedScales::collect(const std::vector<torch::nn::Module*>& roots, int64_t history_len,
                                     at::Device device) {
  DelayedScales all;
  for (const torch::nn::Module* root : roots)
    for (const auto& named : root->named_modules(/*name_prefix=*/"", /*include_self=*/false))
      if (const auto* linear = dynamic_cast<const nn::LinearImpl*>(named.value().get()))
        if (const auto layer = float8_layer(*linear->products()); layer && layer->scales)
          all.layers_.push_back({named.key(), layer->scales});
  const auto rows = static_cast<int64_t>(3 * all.layers_.size());
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  all.history_ = at::zeros({rows, history_len}, options);
  all.largest_ = at::zeros({rows}, options);
  all.pending_ = at::zeros({rows}, options);
  int64_t row = 0;
  for (const Layer& layer : all.layers_)
    for (DelayedScale* scale : {&layer.scales->input, &layer.scales->weight, &layer.scales->grad_output}) {
      *scale = {all.largest_[row], all.pending_[row]};
      ++row;
    }
  return all;
}

at::Tensor DelayedScales::history(size_t i) const {
  return history_.narrow(0, 3 * static_cast<int64_t>(i), 3);
}

void DelayedScales::update(const std::function<void(const at::Tensor&)>& reduce_max) {
  const at::NoGradGuard no_grad;
  reduce_max(pending_);
  update_histories(history_, pending_, largest_);
  for (const Layer& layer : layers_) layer.scales->ready = true;
}

void DelayedScales::loaded() {
  const at::NoGradGuard no_grad;
  largest_.copy_(history_.amax(1));
  pending_.zero_();
  for (const Layer& layer : layers_) layer.scales->ready = true;
}

}  // namespace titan::float8
