#include "plan/calibrate.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <thread>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/csrc/autograd/autograd.h>

#include "core/process.h"
#include "core/units.h"
#include "dist/device_backend.h"
#include "dist/stream.h"
#include "plan/cost_model.h"
#include "titan/core/error.h"

namespace titan::plan {

namespace {

class Measurement {
 public:
  explicit Measurement(at::Device device) : device_(device) {}

  at::Tensor tensor(at::IntArrayRef sizes, at::ScalarType dtype) const {
    return at::ones(sizes, at::TensorOptions(device_).dtype(dtype));
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
    std::ranges::sort(rounds);
    return rounds[rounds.size() / 2];
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

void measure_products(const Measurement& measure, bool is_cpu, DeviceSpec& device,
                      const std::function<void(const std::string&)>& progress) {
  device.efficiency.clear();
  device.tflops.clear();
  for (const auto& [dtype, name] : {std::pair(at::kFloat, "float32"), std::pair(at::kBFloat16, "bfloat16")}) {
    struct Measured {
      Shape shape;
      double tflops;
    };
    std::vector<Measured> all;
    for (const Shape& shape : is_cpu ? kSmall : kLarge) {
      const at::Tensor a = measure.tensor({shape.m, shape.k}, dtype),
                       b = measure.tensor({shape.k, shape.n}, dtype);
      const double seconds = measure.seconds_of([&] { return at::mm(a, b); });
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

// Causal attention of 16 heads. A pair of a query and a key takes 4 operations a feature forward, and 10 backward (observe/operation_costs.cpp).
void measure_attention(const Measurement& measure, bool is_cpu, DeviceSpec& device,
                       const std::function<void(const std::string&)>& progress) {
  device.attention.clear();
  constexpr int64_t heads = 16;
  const int64_t size = is_cpu ? 64 : 128;
  const std::vector<int64_t> lengths =
      is_cpu ? std::vector<int64_t>{64, 256, 1024} : std::vector<int64_t>{512, 2048, 8192};
  for (const int64_t length : lengths) {
    const at::AutoGradMode with_gradients(true);
    const auto input = [&] {
      return measure.tensor({1, heads, length, size}, at::kBFloat16).requires_grad_();
    };
    const at::Tensor q = input(), k = input(), v = input();
    const auto attend = [&] {
      return at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true);
    };
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
                                .kernel = ""});
    progress(str("attention over ", length, " tokens: ", device.attention.back().forward,
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
    device.memory_gib = static_cast<double>(devices->memory(0).total_bytes) / kGiB;
    device.compute_capability = devices->compute_capability(0);
    return cluster;
  }
  const double ranks = num_ranks;
  device.name = str("CPU, ", std::thread::hardware_concurrency(), " cores for ", num_ranks,
                    num_ranks == 1 ? " rank" : " ranks");
  device.memory_gib = machine_memory_gib() / ranks;
  device.is_cpu = true;
  device.compute_capability = 80;  // for the branches that a plan takes: a CPU has none
  device.multiprocessors = 1;      // no tiles: products go by the measured points alone
  for (auto& [dtype, tflops] : device.tflops) tflops /= ranks;
  device.memory_gb_per_s /= ranks;
  // A rank has its share of the cores as threads, at least one.
  const double cores = std::max(1U, std::thread::hardware_concurrency());
  device.alone = std::max(1.0, ranks / cores);
  // Ranks of one host pass data through memory: written by one, read by the other.
  cluster.host = {.devices = std::max(num_ranks, 1),
                  .gb_per_s = std::round(1e-7 * copied / 4 / ranks / kHostLinkShare) / 100,
                  .latency_us = 20};
  return cluster;
}

}  // namespace titan::plan
