// Signal-to-noise ratio of Float8's gradients, layer by layer, in decibels: 20 log10(||g|| / ||g' - g||),
// where g is the gradient in fp32 and g' the gradient with an emulated recipe.
//
//   float8_snr_bench [--layers N] [--dim N] [--rows N] [--seq-len N] [--steps N] [--text FILE]
//
// A small Llama over the bytes of FILE is trained for --steps steps of AdamW in fp32. Then each recipe
// computes the gradients of the same next batch with the same weights. The history of delayed scales has the
// batch before it. For comparison, "bfloat16" is the whole model in bfloat16. Prints one JSON object per
// recipe: its name and the ratio for each weight.

#include <cmath>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "titan/core/error.h"
#include "titan/float8/convert.h"
#include "titan/models/llama3.h"
#include "titan/optim/optimizer.h"
#include "titan/parallel/parameters.h"

namespace {

using namespace titan;

struct Options {
  int64_t layers = 4, dim = 128, rows = 4, seq_len = 128, steps = 10;
  std::string text = "README.md";
};

Options parse(const std::vector<std::string>& args) {
  Options options;
  TITAN_CHECK(args.size() % 2 == 0, "every option needs a value");
  const std::map<std::string, int64_t*> numbers = {{"--layers", &options.layers},
                                                   {"--dim", &options.dim},
                                                   {"--rows", &options.rows},
                                                   {"--seq-len", &options.seq_len},
                                                   {"--steps", &options.steps}};
  for (size_t i = 0; i < args.size(); i += 2) {
    if (const auto number = numbers.find(args[i]); number != numbers.end()) {
      *number->second = std::stoll(args[i + 1]);
    } else {
      TITAN_CHECK(args[i] == "--text", "unknown option ", args[i]);
      options.text = args[i + 1];
    }
  }
  return options;
}

struct Batch {
  at::Tensor tokens, labels;
};

// Batch number `index` of the file's bytes; at the end of the file it continues from the beginning.
Batch batch(const at::Tensor& bytes, const Options& options, int64_t index) {
  const int64_t count = options.rows * options.seq_len;
  const at::Tensor places = (at::arange(count + 1) + index * count).remainder(bytes.size(0));
  const at::Tensor row = bytes.index_select(0, places);
  const std::vector<int64_t> sizes = {options.rows, options.seq_len};
  return {row.narrow(0, 0, count).view(sizes), row.narrow(0, 1, count).contiguous().view(sizes)};
}

at::Tensor bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), {}};
  TITAN_CHECK(!bytes.empty(), path, " is missing or empty");
  return at::tensor(at::ArrayRef<uint8_t>(bytes)).to(at::kLong);
}

models::Llama3Args args_of(const Options& options) {
  return {.dim = options.dim,
          .n_layers = options.layers,
          .n_heads = 8,
          .n_kv_heads = 4,
          .vocab_size = 256,
          .multiple_of = 64,
          .max_seq_len = options.seq_len};
}

using Gradients = std::map<std::string, at::Tensor>;

void run_backward(const models::Llama3& model, const Batch& batch) {
  model(batch.tokens, batch.labels, batch.labels.numel()).backward();
}

// The gradients of the linear layers in blocks, in fp32.
Gradients gradients(const models::Llama3& model, const Batch& batch) {
  const auto all = parameters(model);
  for (const Parameter& parameter : all) parameter.data.local.mutable_grad().reset();
  run_backward(model, batch);
  Gradients found;
  for (const Parameter& parameter : all)
    if (parameter.data.local.dim() == 2 && parameter.name.starts_with("layers."))
      found[parameter.name] = parameter.data.local.grad().to(at::kFloat).clone();
  return found;
}

void train_model(const models::Llama3& model, const at::Tensor& bytes, const Options& options) {
  optim::OptimizerSettings settings;
  settings.lr = 1e-3;
  optim::Optimizer optimizer(parameters(model), settings);
  for (int64_t step = 0; step < options.steps; ++step) {
    optimizer.zero_grad();
    run_backward(model, batch(bytes, options, step));
    optimizer.step();
  }
}

void print(const std::string& name, const Gradients& found, const Gradients& wanted) {
  std::cout << "{\"recipe\": \"" << name << "\"";
  for (const auto& [parameter, g] : wanted) {
    const double noise = (found.at(parameter) - g).norm().item<double>();
    std::cout << ", \"" << parameter << "\": " << 20 * std::log10(g.norm().item<double>() / noise);
  }
  std::cout << "}" << std::endl;
}

float8::ConvertOptions recipe(const std::string& name) {
  float8::ConvertOptions options{.recipe_name = name, .arithmetic = float8::Arithmetic::Emulated};
  if (name == "tensorwise, delayed") {
    options.recipe_name = "tensorwise";
    options.delayed = {.input = true, .weight = true, .grad_output = true};
  }
  options.plain = ops::default_products();
  return options;
}

Gradients in_recipe(const models::Llama3& model, const std::string& name, const Batch& before,
                    const Batch& measured) {
  float8::convert(*model.ptr(), recipe(name));
  auto scales = float8::DelayedScales::collect({model.ptr().get()}, 16, at::kCPU);
  if (!scales.empty()) {
    gradients(model, before);
    scales.update([](const at::Tensor&) {});
  }
  Gradients found = gradients(model, measured);
  nn::set_products(*model.ptr(), ops::default_products());
  return found;
}

Gradients in_bfloat16(const models::Llama3& model, const Options& options, const Batch& measured) {
  const models::Llama3 low(args_of(options), deferred(at::kCPU, at::kBFloat16));
  materialize(low, 0);
  const auto from = parameters(model), to = parameters(low);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < from.size(); ++i) to[i].data.local.copy_(from[i].data.local);
  const at::AutoGradMode grad(true);
  return gradients(low, measured);
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse({argv + 1, argv + argc});
  const at::Tensor bytes = bytes_of(options.text);
  const models::Llama3 model(args_of(options), deferred(at::kCPU, at::kFloat));
  materialize(model, 0);
  train_model(model, bytes, options);
  const Batch before = batch(bytes, options, options.steps),
              measured = batch(bytes, options, options.steps + 1);
  const Gradients wanted = gradients(model, measured);
  print("bfloat16", in_bfloat16(model, options, measured), wanted);
  for (const char* name : {"tensorwise", "tensorwise, delayed", "rowwise", "rowwise_with_gw_hp",
                           "mxfp8_cublas", "mxfp8_cublas_rceil"})
    print(name, in_recipe(model, name, before, measured), wanted);
}
