// Time of an optimizer step and of gradient clipping on the parameters of a 134M Llama (dim 768, 12 layers,
// vocabulary 32,000).
//
//   optim_bench [--runs N] [--dtype float32|bfloat16] [--threads N]
//
// Prints one JSON object: median milliseconds of each, over interleaved runs. A step reads parameter,
// gradient and two moments, and writes parameter and moments, so fused_gb_per_s is 7 times the parameters'
// bytes divided by the time.

#include <algorithm>
#include <chrono>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "titan/core/error.h"
#include "titan/optim/clip.h"
#include "titan/optim/optimizer.h"

namespace {

using titan::Parameter;

Parameter make_parameter(const std::string& name, at::IntArrayRef shape, at::ScalarType dtype) {
  Parameter parameter;
  parameter.name = name;
  parameter.data.local = (at::randn(shape) * 0.02).to(dtype).requires_grad_(true);
  parameter.data.global_shape = shape.vec();
  parameter.data.local.mutable_grad() = (at::randn(shape) * 1e-3).to(dtype);
  return parameter;
}

std::vector<Parameter> llama_134m(at::ScalarType dtype) {
  constexpr int64_t dim = 768, hidden = 2048, vocabulary = 32'000, layers = 12;
  std::vector<Parameter> parameters;
  auto add = [&](const std::string& name, std::vector<int64_t> shape) {
    parameters.push_back(make_parameter(name, shape, dtype));
  };
  add("tok_embeddings.weight", {vocabulary, dim});
  for (int64_t layer = 0; layer < layers; ++layer) {
    std::string prefix = titan::str("layers.", layer, ".");
    for (const char* name : {"wq", "wk", "wv", "wo"})
      add(prefix + "attention." + name + ".weight", {dim, dim});
    for (const char* name : {"w1", "w3"}) add(prefix + "feed_forward." + name + ".weight", {hidden, dim});
    add(prefix + "feed_forward.w2.weight", {dim, hidden});
    for (const char* name : {"attention_norm", "ffn_norm"}) add(prefix + name + ".weight", {dim});
  }
  add("norm.weight", {dim});
  add("output.weight", {vocabulary, dim});
  return parameters;
}

template <class Body>
double milliseconds(Body&& body) {
  auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Options {
  int runs = 5;
  std::string dtype = "float32";
  int threads = at::get_num_threads();
};

Options parse(const std::vector<std::string>& args) {
  Options options;
  TITAN_CHECK(args.size() % 2 == 0, "usage: optim_bench [--runs N] [--dtype float32|bfloat16] [--threads N]");
  for (size_t i = 0; i < args.size(); i += 2) {
    if (args[i] == "--runs")
      options.runs = std::stoi(args[i + 1]);
    else if (args[i] == "--dtype")
      options.dtype = args[i + 1];
    else if (args[i] == "--threads")
      options.threads = std::stoi(args[i + 1]);
    else
      TITAN_CHECK(false, "unknown option ", args[i]);
  }
  return options;
}

int run(const std::vector<std::string>& args) {
  Options options = parse(args);
  at::set_num_threads(options.threads);
  std::vector<Parameter> parameters = llama_134m(options.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat);
  int64_t numel = 0, bytes = 0;
  for (const auto& parameter : parameters)
    numel += parameter.data.local.numel(), bytes += parameter.data.local.nbytes();

  std::map<std::string, std::vector<double>> times;
  const std::vector<std::string> implementations = {"fused", "foreach", "for-loop"};
  std::vector<titan::optim::Optimizer> optimizers;
  for (const auto& name : implementations) {
    optimizers.emplace_back(
        parameters, titan::optim::OptimizerSettings{.lr = 1e-6, .implementation = name, .param_groups = {}});
    optimizers.back().step();
  }
  for (int i = 0; i < options.runs; ++i) {
    for (size_t k = 0; k < optimizers.size(); ++k) {
      times[implementations[k]].push_back(milliseconds([&] { optimizers[k].step(); }));
    }
    double norm = 0;
    times["norm"].push_back(milliseconds([&] { norm = titan::optim::clip_grad_norm(parameters).norm; }));
    times["norm_and_scale"].push_back(
        milliseconds([&] { titan::optim::clip_grad_norm(parameters, norm / 2); }));
  }
  std::cout << "{\"parameters\": " << numel << ", \"dtype\": \"" << options.dtype
            << "\", \"threads\": " << options.threads;
  for (const auto& [name, values] : times) std::cout << ", \"" << name << "_ms\": " << median(values);
  std::cout << ", \"fused_gb_per_s\": " << 7e-6 * static_cast<double>(bytes) / median(times["fused"]) << "}"
            << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const titan::Error& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
