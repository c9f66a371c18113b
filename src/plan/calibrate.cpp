#include "plan/calibrate.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <thread>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include "core/process.h"
#include "core/units.h"
#include "dist/device_backend.h"
#include "dist/stream.h"
#include "plan/cost_model.h"
#include "titan/core/error.h"
#include "titan/dist/collectives.h"
#include "titan/ops/functional.h"

namespace titan::plan {

namespace {

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

class Measurement {
 public:
  explicit Measurement(at::Device device) : device_(device) {}

  at::Tensor tensor(at::IntArrayRef sizes, at::ScalarType dtype) const {
    // GPUs multiply equal numbers faster, because they take less power.
    return at::randn(sizes, at::TensorOptions(device_).dtype(dtype));
  }

  /// The median over rounds, each as long as a tenth of a second or one call.
  template <class Work>
  double seconds_of(Work work) const {
    work();
    wait();
    int64_t calls = 1;
    std::vector<double> rounds;
    while (rounds.size() < 5) {
      const auto start = std::chrono::steady_clock::now();
      for (int64_t i = 0; i < calls; ++i) work();
      wait();
      const double seconds = seconds_since(start);
      if (seconds < 0.05 && calls < 1'000'000) {
        calls *= 2;
        continue;
      }
      rounds.push_back(seconds / static_cast<double>(calls));
    }
    return median(std::move(rounds));
  }

 private:
  void wait() const {
    if (!device_.is_cpu()) dist::Stream::current(device_).synchronize();
  }
  at::Device device_;
};

struct Shape {
  int64_t m, n, k;
};
// A GPU's first tiles, a block's products, and thin ones.
constexpr std::array<Shape, 6> kLarge = {Shape{8192, 8192, 8192}, Shape{4096, 4096, 4096},
                                         Shape{8192, 1024, 8192}, Shape{8192, 4096, 1024},
                                         Shape{2048, 2048, 2048}, Shape{16384, 4096, 4096}};
constexpr std::array<Shape, 6> kSmall = {Shape{1024, 1024, 1024}, Shape{256, 256, 256},
                                         Shape{512, 2048, 512},   Shape{2048, 256, 256},
                                         Shape{128, 1024, 1024},  Shape{64, 128, 128}};

// One scale for each matrix, as the recipe "tensorwise" has.
std::function<at::Tensor()> product_of(const Measurement& measure, const Shape& shape, at::ScalarType dtype) {
  const at::Tensor a = measure.tensor({shape.m, shape.k}, at::kBFloat16).to(dtype);
  if (dtype != at::kFloat8_e4m3fn) {
    const at::Tensor b = measure.tensor({shape.k, shape.n}, dtype);
    return [=] { return at::mm(a, b); };
  }
  const at::Tensor b = measure.tensor({shape.n, shape.k}, at::kBFloat16).to(dtype),
                   one = at::ones({}, a.options().dtype(at::kFloat));
  return [=] {
    return at::_scaled_mm(a, b.t(), one, one, /*bias=*/{}, /*scale_result=*/{}, at::kBFloat16,
                          /*use_fast_accum=*/true);
  };
}

void measure_products(const Measurement& measure, bool is_cpu, DeviceSpec& device,
                      const std::function<void(const std::string&)>& progress) {
  device.efficiency.clear();
  device.tflops.clear();
  std::vector<std::pair<at::ScalarType, const char*>> dtypes = {{at::kFloat, "float32"},
                                                                {at::kBFloat16, "bfloat16"}};
  if (!is_cpu && device.compute_capability >= 89) dtypes.emplace_back(at::kFloat8_e4m3fn, "float8");
  for (const auto& [dtype, name] : dtypes) {
    struct Measured {
      Shape shape;
      double tflops;
    };
    std::vector<Measured> all;
    for (const Shape& shape : is_cpu ? kSmall : kLarge) {
      const double seconds = measure.seconds_of(product_of(measure, shape, dtype));
      const double flops =
          2.0 * static_cast<double>(shape.m) * static_cast<double>(shape.n) * static_cast<double>(shape.k);
      all.push_back({shape, 1e-12 * flops / seconds});
      progress(str(name, " product [", shape.m, ", ", shape.k, "] x [", shape.k, ", ", shape.n,
                   "]: ", std::round(1e4 * all.back().tflops) / 1e4, " TFLOP/s"));
    }
    const double best = std::ranges::max_element(all, {}, &Measured::tflops)->tflops;
    device.tflops[name] = best;
    for (const Measured& each : all)
      device.efficiency.push_back(
          {name, each.shape.m, each.shape.n, each.shape.k, std::round(1e3 * each.tflops / best) / 1e3});
  }
}

// Causal attention of 16 heads, by the kernels that models have. A pair of a query and a key takes 4 operations a feature
// forward, and 10 backward (observe/operation_costs.cpp).
void measure_attention(const Measurement& measure, bool is_cpu, DeviceSpec& device,
                       const std::function<void(const std::string&)>& progress) {
  device.attention.clear();
  constexpr int64_t heads = 16;
  const std::vector<int64_t> lengths =
      is_cpu ? std::vector<int64_t>{64, 256, 1024} : std::vector<int64_t>{512, 2048, 8192};
  std::vector<std::pair<int64_t, int64_t>> shapes;  // length, size of a head
  for (const int64_t size : is_cpu ? std::vector<int64_t>{16, 64, 128} : std::vector<int64_t>{128})
    for (const int64_t length : lengths) shapes.emplace_back(length, size);
  for (const auto& [length, size] : shapes) {
    const at::AutoGradMode with_gradients(true);
    const auto input = [&, length = length, size = size] {
      return measure.tensor({1, length, heads, size}, at::kBFloat16).requires_grad_();
    };
    const at::Tensor q = input(), k = input(), v = input();
    const auto attend = [&] { return ops::causal_attention(q, k, v); };
    const at::Tensor out = attend(), grad = at::ones_like(out);
    const double features_of_pairs = 0.5 * static_cast<double>(heads * length * length * size);
    const auto share_of = [&](double flops, double seconds) {
      return std::round(1e3 * std::clamp(flops / seconds / device.peak_flops(at::kBFloat16), 1e-3, 1.0)) /
             1e3;
    };
    device.attention.push_back({.sequence = length,
                                .forward = share_of(4 * features_of_pairs, measure.seconds_of(attend)),
                                .backward = share_of(10 * features_of_pairs, measure.seconds_of([&] {
                                  torch::autograd::grad({out}, {q, k, v}, {grad}, /*retain_graph=*/true);
                                })),
                                .kernel = "",
                                .features = size});
    progress(str("attention over ", length, " tokens, heads of ", size, ": ", device.attention.back().forward,
                 " of the peak, backward ", device.attention.back().backward));
  }
}

}  // namespace

// The cost model takes shares of data sheets' figures, so what is measured is written larger.
ClusterSpec calibrate(const ClusterSpec& base, int num_ranks,
                      const std::function<void(const std::string&)>& progress) {
  const at::NoGradGuard no_grad;
  ClusterSpec cluster = base;
  DeviceSpec& device = cluster.device;
  dist::DeviceBackend* const devices = dist::open_cuda_plugin();
  const bool is_cpu = devices == nullptr || devices->num_devices() == 0;
  const Measurement measure(is_cpu ? at::Device(at::kCPU) : at::Device(at::kCUDA, 0));
  // On a CPU, for the branches that a plan takes.
  device.compute_capability = is_cpu ? 80 : devices->compute_capability(0);

  measure_products(measure, is_cpu, device, progress);
  measure_attention(measure, is_cpu, device, progress);
  const at::Tensor from = measure.tensor({int64_t{1} << 26}, at::kFloat), to = at::empty_like(from);
  const double copied =
      2 * static_cast<double>(from.nbytes()) / measure.seconds_of([&] { return to.copy_(from); });
  progress(str("copies: ", std::round(copied * 1e-8) / 10, " GB/s read and written"));
  device.memory_gb_per_s = std::round(1e-7 * copied / kMemoryShare) / 100;
  const at::Tensor small = measure.tensor({1}, at::kFloat);
  device.launch_us = std::round(1e8 * measure.seconds_of([&] { return small.add_(1); })) / 100;
  device.power = 1;

  if (!is_cpu) {
    device.name = devices->device_name(0);
    device.multiprocessors = devices->num_multiprocessors(0);
    device.memory_gib = static_cast<double>(devices->memory(0).total_bytes) / kGiB;
    return cluster;
  }
  const double ranks = num_ranks;
  device.name = str("CPU, ", std::thread::hardware_concurrency(), " cores for ", num_ranks,
                    num_ranks == 1 ? " rank" : " ranks");
  device.memory_gib = machine_memory_gib() / ranks;
  device.is_cpu = true;
  device.multiprocessors = 1;  // no tiles: products go by the measured points alone
  for (auto& [dtype, tflops] : device.tflops) tflops /= ranks;
  device.memory_gb_per_s /= ranks;
  // A rank has its share of the cores as threads, at least one.
  const double cores = std::max(1U, std::thread::hardware_concurrency());
  device.alone = std::max(1.0, ranks / cores);
  if (num_ranks == 1) cluster.host = {.devices = 1, .gb_per_s = device.memory_gb_per_s, .latency_us = 0};
  return cluster;
}

ClusterSpec::Host measure_links(const dist::World& world) {
  TITAN_CHECK(world.size() > 1, "one rank has no links");
  const auto everyone = world.everyone();
  const auto seconds_of_gather = [&](int64_t bytes, int calls) {
    const at::Tensor part = at::zeros({bytes}, at::kByte), all = at::zeros({world.size() * bytes}, at::kByte);
    std::vector<double> rounds;
    for (int round = 0; round < 6; ++round) {  // the first makes connections
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < calls; ++i) everyone->all_gather(all, part, {"calibrate::gather"}).wait();
      if (round > 0) rounds.push_back(seconds_since(start) / calls);
    }
    return median(std::move(rounds));
  };
  constexpr int64_t large_part = int64_t{8} << 20;
  const double hops = world.size() - 1, small = seconds_of_gather(8, 50),
               large = seconds_of_gather(large_part, 4);
  // The time of a round of products, and how much longer it takes with a gather of all ranks after each. Rounds of both kinds take turns.
  const at::Tensor factor = at::ones({256, 256}), number = at::zeros({2}, at::kDouble),
                   numbers = at::zeros({world.size(), 2}, at::kDouble);
  const auto seconds_of_rounds = [&](int64_t products, int rounds, bool meets) {
    everyone->all_gather(numbers, number, {"calibrate::start"}).wait();
    const auto start = std::chrono::steady_clock::now();
    for (int round = 0; round < rounds; ++round) {
      for (int64_t i = 0; i < products; ++i) at::mm(factor, factor);
      if (meets) everyone->all_gather(numbers, number, {"calibrate::meeting"}).wait();
    }
    return seconds_since(start) / rounds;
  };
  const auto computed_and_late = [&](int64_t products, int rounds) {
    std::vector<double> computed, late;
    for (int repetition = 0; repetition < 7; ++repetition) {
      computed.push_back(seconds_of_rounds(products, rounds, /*meets=*/false));
      late.push_back(seconds_of_rounds(products, rounds, /*meets=*/true) - computed.back());
    }
    number[0].fill_(median(std::move(computed)));
    number[1].fill_(median(std::move(late)));
    everyone->all_gather(numbers, number, {"calibrate::times"}).wait();
    return std::pair(numbers.select(1, 0).mean().item<double>(), numbers.select(1, 1).mean().item<double>());
  };
  double late_share = 0, late_us = 0;
  if (world.size() > static_cast<int>(std::thread::hardware_concurrency())) {
    const double of_one = computed_and_late(100, 1).first / 100;  // the same on all ranks
    const auto products_in = [&](double seconds) {
      return static_cast<int64_t>(std::ceil(seconds / of_one));
    };
    const auto [computed, late] = computed_and_late(products_in(1e-3), 100);
    const double most_late = computed_and_late(products_in(16e-3), 10).second;
    late_share = std::round(1e3 * std::max(0.0, late - small) / computed) / 1e3;
    late_us = std::round(1e6 * std::max({0.0, late - small, most_late - small}));
  }
  const double bytes_per_s = hops * static_cast<double>(large_part) / std::max(large - small, 1e-9);
  return {.devices = world.size(),
          .gb_per_s = std::round(1e-7 * bytes_per_s / kHostLinkShare) / 100,
          .latency_us = std::round(1e8 * small / hops) / 100,
          .late_share = late_share,
          .late_us = late_us};
}

}  // namespace titan::plan
