// Time to draw initial weights, per element and core.
//
//   init_bench [--numel N] [--runs N]
//
// Prints one JSON object: median nanoseconds per element for a normal, a truncated normal and a uniform
// distribution, on one thread.

#include <algorithm>
#include <chrono>
#include <iostream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "titan/core/error.h"
#include "titan/nn/hooks.h"

namespace {

using titan::nn::Init;

double median_ns(const Init& init, at::Tensor& weight, int runs) {
  std::vector<double> times;
  for (int i = 0; i < runs; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    titan::nn::fill(weight, init, {1, "layers.0.attention.wq.weight"}, weight.sizes(),
                    {{0}, {weight.numel()}});
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    times.push_back(took.count() / static_cast<double>(weight.numel()));
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

int run(const std::vector<std::string>& args) {
  int64_t numel = 4'000'000;
  int runs = 5;
  TITAN_CHECK(args.size() % 2 == 0, "usage: init_bench [--numel N] [--runs N]");
  for (size_t i = 0; i < args.size(); i += 2) {
    if (args[i] == "--numel")
      numel = std::stoll(args[i + 1]);
    else if (args[i] == "--runs")
      runs = std::stoi(args[i + 1]);
    else
      TITAN_CHECK(false, "unknown option ", args[i]);
  }
  at::set_num_threads(1);
  at::Tensor weight = at::zeros({numel});
  std::cout << "{\"normal_ns\": " << median_ns(Init::normal(0, 0.02), weight, runs)
            << ", \"truncated_normal_ns\": "
            << median_ns(Init::truncated_normal(0.02, -0.06, 0.06), weight, runs)
            << ", \"uniform_ns\": " << median_ns(Init::uniform(-1, 1), weight, runs) << "}" << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
