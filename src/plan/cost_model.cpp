#include "plan/cost_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <set>

#include <c10/core/ScalarTypeToTypeMeta.h>

#include "core/units.h"
#include "titan/core/error.h"

namespace titan::plan {

namespace {

// ---- constants, each with its source; the table in docs/plan.md has them all

// The share that a network card reaches: 46 to 48 of 50 GB/s (NVIDIA/nccl-tests, issue 290).
constexpr double kNetworkShare = 0.94;
// NVLink's switches add up by themselves: 476 GB/s of 450 in an all_reduce on 8 H100 (the same issue; 480 in issue 212).
constexpr double kSwitchSumShare = 1.06;
constexpr double kSwitchSumLatencyUs = 23;  // tuning.cc of NVIDIA/nccl: NVLS
// How many times the bytes of our casts to Float8 those that Inductor makes of torchao's move. Fitted.
constexpr double kCompiledCasts = 2.1;
// Host time of a transformer block on CPU tensors by its launches (benchmarks/results/host_time.md, which has 15 to 18 us on virtual GPUs).
constexpr double kHostUs = 8, kHostUsCompiled = 20, kHostUsEager = 30;

/// NCCL's protocols: the latency of the first hop, hops relative to those of rings with the Simple protocol, and the share of the links' speed
/// (tuning.cc).
struct Protocol {
  double base_us, host_hop, network_hop, share;
};
constexpr std::array<Protocol, 3> kProtocols = {Protocol{8.4, 1.0, 1.0, 1.0},                 // Simple
                                                Protocol{14.0, 1.9 / 3.4, 4.0 / 14.0, 0.92},  // LL128
                                                Protocol{6.6, 0.6 / 3.4, 2.7 / 14.0, 0.25}};  // LL
constexpr double kTreeShare = 0.92;
std::array<Protocol, 3> tree_protocols(bool between_hosts) {
  return {Protocol{0.0, 28.0 / 3.4, 28.0 / 14.0, kTreeShare},
          Protocol{14.0, 1.25 / 3.4, 8.5 / 14.0, kTreeShare * (between_hosts ? 120.0 / 128 : 7.0 / 9)},
          Protocol{6.8, 0.6 / 3.4, 5.0 / 14.0, kTreeShare / 3.8}};
}

// ---- products

/// Sizes of tiles that GEMM kernels come with (NVIDIA's Matrix Multiplication Background User's Guide), and what share of a multiprocessor's best
/// each of them reaches: assumptions.
struct Tile {
  int64_t rows, columns;
  double share;
};
constexpr std::array<Tile, 3> kTiles = {Tile{128, 256, 1.0}, Tile{128, 128, 0.9}, Tile{64, 128, 0.75}};
// A tile's start and end take as long as so many steps along k: an assumption.
constexpr double kTileOverhead = 256;

double powers_of_two(int64_t size) { return std::log2(static_cast<double>(std::max<int64_t>(size, 1))); }
double square(double x) { return x * x; }

int64_t parts_of(int64_t count, int64_t each) { return (count + each - 1) / each; }

// The share of all multiprocessors' time that is spent on the result's elements.
double share_of_tiles(const train::ProductShape& shape, int64_t multiprocessors) {
  if (multiprocessors < 2) return 1;
  double best = 0;
  for (const Tile& tile : kTiles) {
    const int64_t tiles = shape.batches * parts_of(shape.m, tile.rows) * parts_of(shape.n, tile.columns);
    const double in_tiles = static_cast<double>(parts_of(tiles, multiprocessors) * multiprocessors) *
                            static_cast<double>(tile.rows * tile.columns);
    const double elements =
        static_cast<double>(shape.batches) * static_cast<double>(shape.m) * static_cast<double>(shape.n);
    best = std::max(best, tile.share * elements / in_tiles);
  }
  const auto k = static_cast<double>(shape.k);
  return best * k / (k + kTileOverhead);
}

std::string name_of_dtype(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kBFloat16:
    case c10::kHalf:
      return "bfloat16";
    case c10::kFloat8_e4m3fn:
    case c10::kFloat8_e5m2:
      return "float8";
    default:
      return "float32";
  }
}

// ---- other kernels

/// The kernels in place of one of ours: their bytes relative to its, and their number.
struct Replacement {
  std::string_view ours;
  double compiled_bytes, compiled_launches, eager_bytes, eager_launches;
};

// Counted from the formulas, in passes over the tensor: of PyTorch 2.6's operations in eager mode, which had no fused RMSNorm, and of
// the kernels that Inductor makes of a block (docs/plan.md).
constexpr std::array kReplacements = {
    Replacement{"add_rms_norm_kernel", 1.1, 1, 20.0 / 4, 8},
    Replacement{"rms_norm_backward_kernel", 1.2, 2, 36.0 / 3, 16},
    Replacement{"rms_norm_kernel", 1.1, 1, 17.0 / 2, 7},
    Replacement{"rotary_kernel", 1.2, 1, 10.0 / 2, 4},
    Replacement{"swiglu_backward_kernel", 1.0, 1, 9.0 / 6, 3},
    Replacement{"swiglu_kernel", 1.0, 1, 5.0 / 3, 2},
    Replacement{"cross_entropy_kernel", 2.0, 2, 9.0, 8},
    Replacement{"vocabulary_stats_kernel", 2.0, 2, 5.0, 4},
    Replacement{"vocabulary_grad_kernel", 1.5, 1, 4.0, 4},
    Replacement{"cast_", kCompiledCasts, 2, 4.0, 8},
    Replacement{"magnitudes_", kCompiledCasts, 2, 4.0, 4},
    Replacement{"measured_rows_", kCompiledCasts, 2, 4.0, 8},
    Replacement{"scales_of_columns_kernel", 0, 0, 0, 0},  // the casts' kernels make them
    Replacement{"aten::_fused_adamw_", 1.0, 1, 3.0, 12},
    Replacement{"adam_kernel", 1.0, 1, 3.0, 12},
};

const Replacement* replacement_of(std::string_view name) {
  const auto* found = std::ranges::find_if(
      kReplacements, [&](const Replacement& each) { return name.starts_with(each.ours); });
  return found == kReplacements.end() ? nullptr : found;
}

}  // namespace

KernelKind kind_of(const Launch& launch, std::string_view name) {
  if (launch.flops <= 0) return KernelKind::Other;
  return name.find("attention") != std::string_view::npos ? KernelKind::Attention : KernelKind::Product;
}

int64_t DeviceSpec::usable_bytes() const {
  // A context with its code and stacks takes about this much of a GPU: an assumption.
  constexpr int64_t context_bytes = int64_t{600} << 20;
  return std::llround(memory_gib * kGiB) - (is_cpu ? 0 : context_bytes);
}

double DeviceSpec::peak_flops(c10::ScalarType dtype) const {
  const auto found = tflops.find(name_of_dtype(dtype));
  if (found == tflops.end())
    throw ConfigError(str("the device's file has no device.tflops.", name_of_dtype(dtype),
                          ", which products in ", c10::toString(dtype), " need"));
  return found->second * 1e12;
}

CostModel::CostModel(const ClusterSpec& cluster, Kernels kernels) : cluster_(cluster), kernels_(kernels) {
  for (const DeviceSpec::ProductPoint& point : cluster.device.efficiency) {
    const double modelled = share_of_tiles({.batches = 1, .m = point.m, .n = point.n, .k = point.k},
                                           cluster.device.multiprocessors);
    measured_[point.dtype].push_back(
        {powers_of_two(point.m), powers_of_two(point.n), powers_of_two(point.k), point.share / modelled});
  }
}

double CostModel::host_us() const {
  return kernels_ == Kernels::Ours ? kHostUs : kernels_ == Kernels::Compiled ? kHostUsCompiled : kHostUsEager;
}

double CostModel::host_seconds() const { return cluster_.device.is_cpu ? 0 : 1e-6 * host_us(); }

double CostModel::launch_seconds() const {
  const DeviceSpec& device = cluster_.device;
  return 1e-6 * (device.is_cpu ? device.alone * std::max(device.launch_us, host_us()) : device.launch_us);
}

double CostModel::late_seconds(double computed) const {
  return std::min(cluster_.host.late_share * computed, 1e-6 * cluster_.host.late_us);
}

double CostModel::seconds_of_bytes(double bytes) const {
  return bytes / (kMemoryShare * cluster_.device.memory_gb_per_s * 1e9);
}

// [Note: measured points of products]
// The model says how shapes compare, and the points how fast the device is: each gives a factor, measured by modelled share, and a shape has the
// mean of the points' factors, weighted by the inverse square of their distance (in powers of two of m, n and k).
double CostModel::share_of_product(const train::ProductShape& shape, c10::ScalarType dtype) const {
  const DeviceSpec& device = cluster_.device;
  double sum = 0, weights = 0;
  if (const auto found = measured_.find(name_of_dtype(dtype)); found != measured_.end()) {
    const double m = powers_of_two(shape.m), n = powers_of_two(shape.n), k = powers_of_two(shape.k);
    for (const MeasuredProduct& point : found->second) {
      const double weight = 1 / (0.01 + square(m - point.m) + square(n - point.n) + square(k - point.k));
      sum += weight * point.factor;
      weights += weight;
    }
  }
  const double factor = weights > 0 ? sum / weights : 1;
  return std::min(1.0, factor * share_of_tiles(shape, device.multiprocessors)) * device.power;
}

namespace {

// Between the two neighbors of x among points in ascending order, on a logarithmic scale. Beyond them, the last one.
template <class Point>
double between(const std::vector<Point>& points, double x,
               const std::function<double(const Point&)>& place_of,
               const std::function<double(const Point&)>& value_of) {
  const auto above = std::ranges::find_if(points, [&](const Point& point) { return place_of(point) >= x; });
  if (above == points.begin()) return value_of(*above);
  if (above == points.end()) return value_of(points.back());
  const double low = place_of(*(above - 1)), part = std::log(x / low) / std::log(place_of(*above) / low);
  return value_of(*(above - 1)) + part * (value_of(*above) - value_of(*(above - 1)));
}

}  // namespace

double CostModel::share_of_attention(const train::ProductShape& shape, bool is_backward) const {
  using Point = DeviceSpec::AttentionPoint;
  const DeviceSpec& device = cluster_.device;
  const char* const kernel = kernels_ == Kernels::Ours && device.compute_capability >= 90 ? "cudnn" : "flash";
  std::map<int64_t, std::vector<Point>> by_size;  // a head's features
  for (const Point& point : device.attention)
    if (point.kernel.empty() || point.kernel == kernel) by_size[point.features].push_back(point);
  if (by_size.empty()) return share_of_product(shape, c10::kBFloat16);
  const double length = std::sqrt(static_cast<double>(shape.m) * static_cast<double>(shape.n));
  struct OfSize {
    double features, share;
  };
  std::vector<OfSize> sizes;
  for (auto& [features, points] : by_size) {
    std::ranges::sort(points, {}, &Point::sequence);
    const double share = between<Point>(
        points, length, [](const Point& point) { return static_cast<double>(point.sequence); },
        [&](const Point& point) { return is_backward ? point.backward : point.forward; });
    const double shorter = length / static_cast<double>(points.front().sequence);
    sizes.push_back({static_cast<double>(features), share * std::sqrt(std::min(1.0, shorter))});
  }
  const auto features = static_cast<double>(shape.k);
  const double share = between<OfSize>(
      sizes, features, [](const OfSize& size) { return size.features; },
      [](const OfSize& size) { return size.share; });
  // Heads of 64 reach three quarters of what heads of 128 do (the charts that the points are from).
  return share * std::pow(std::min(1.0, features / sizes.front().features), 0.4) * device.power;
}

CostModel::KernelTime CostModel::of(const Launch& launch, std::string_view name) const {
  const double bytes = launch.bytes_read + launch.bytes_written;
  if (const KernelKind kind = kind_of(launch, name); kind != KernelKind::Other) {
    const double share =
        kind == KernelKind::Attention
            ? share_of_attention(launch.shape, name.find("backward") != std::string_view::npos)
            : share_of_product(launch.shape, launch.dtype);
    // A CPU's attention was measured in bf16, and takes about as long in fp32, in which our kernel computes both.
    const bool is_as_in_bf16 = cluster_.device.is_cpu && kind == KernelKind::Attention;
    const double peak = cluster_.device.peak_flops(is_as_in_bf16 ? c10::kBFloat16 : launch.dtype);
    const double computing = launch.flops / (peak * share);
    const double product = std::max(computing, seconds_of_bytes(bytes)) + launch_seconds();
    if (name != kAddedProduct || kernels_ == Kernels::Ours) return {product, 1};
    // PyTorch adds a gradient in Float8 to the sum by an operation of its own, which reads both.
    return {product + seconds_of_bytes(3 * launch.bytes_written) + launch_seconds(), 2};
  }
  if (is_copy_over_bus(name))
    return {launch.bytes_written / (kPcieShare * cluster_.host.pcie_gb_per_s * 1e9) + launch_seconds(), 1};
  double factor = 1, launches = 1;
  if (const Replacement* other = replacement_of(name); other && kernels_ != Kernels::Ours) {
    const bool is_compiled = kernels_ == Kernels::Compiled;
    factor = is_compiled ? other->compiled_bytes : other->eager_bytes;
    launches = is_compiled ? other->compiled_launches : other->eager_launches;
  }
  return {seconds_of_bytes(factor * bytes) + launches * launch_seconds(), launches};
}

bool CostModel::is_copy_over_bus(std::string_view name) const {
  return !cluster_.device.is_cpu && (name == kCopyToHost || name == kCopyToDevice);
}

CostModel::KernelTime CostModel::of_copies(const Trace& trace, const Collective& call) const {
  const std::string &op = trace.name(call.op), &label = trace.name(call.label);
  const bool gathers = op == "all_gather", is_of_fsdp = label.starts_with("fsdp::");
  const bool is_of_rows = label.starts_with("tp::") && call.num_tensors > 1;
  if (kernels_ == Kernels::Ours || !(gathers || op == "reduce_scatter") || !(is_of_fsdp || is_of_rows))
    return {0, 0};
  // All bytes of the call are read and written. FSDP's gradients are in the compute dtype, and are written into one buffer of the reduction's dtype,
  // which has twice their bytes (PyTorch's _fsdp_collectives.py).
  const double passes = is_of_fsdp && !gathers ? 1.5 : 2;
  return {seconds_of_bytes(passes * static_cast<double>(call.bytes)) + launch_seconds(), 1};
}

// A GPU's kernel; a CPU's calls are measured as a whole.
double CostModel::first_hop_us() const { return cluster_.device.is_cpu ? 0 : kProtocols[0].base_us; }

int CostModel::host_of(int world_rank) const { return world_rank / static_cast<int>(cluster_.host.devices); }

// Rings, whose slowest link is either a device's in the host, or the host's share of the network: each device of a host brings a card.
CostModel::Transfer CostModel::of(std::string_view op, double bytes,
                                  const std::vector<int>& world_ranks) const {
  std::set<int> hosts;
  for (const int rank : world_ranks) hosts.insert(host_of(rank));
  const auto n = static_cast<double>(world_ranks.size()), num_hosts = static_cast<double>(hosts.size());
  const double per_host = n / num_hosts;
  const double in_host = kHostLinkShare * cluster_.host.gb_per_s * 1e9;
  const double network = kNetworkShare * cluster_.network.gb_per_s * 1e9;
  const bool between_hosts = num_hosts > 1;
  const bool is_sum = op == "all_reduce";
  double speed = in_host;
  if (between_hosts) speed = per_host > 1 ? std::min(in_host, network * per_host) : network;
  const double host_hop = cluster_.host.latency_us, network_hop = cluster_.network.latency_us;
  if (op == "all_to_all") {
    const double outside = bytes * (n - per_host) / n / network,
                 inside = bytes * (per_host - 1) / n / in_host;
    return {1e-6 * (first_hop_us() + (between_hosts ? network_hop : host_hop)) +
                (between_hosts ? std::max(outside, inside) : inside),
            between_hosts};
  }
  const double rounds = is_sum ? 2 : 1;
  const double passed = op == "broadcast" ? bytes : rounds * bytes * (n - 1) / n;
  const double network_hops = between_hosts ? rounds * (num_hosts - 1) : 0;
  const double host_hops = rounds * (n - 1) - network_hops;
  if (cluster_.device.is_cpu)
    return {1e-6 * (host_hops * host_hop + network_hops * network_hop) + passed / speed, between_hosts};
  double best = std::numeric_limits<double>::infinity();
  for (const Protocol& ring : kProtocols) {
    const double latency =
        ring.base_us + host_hops * ring.host_hop * host_hop + network_hops * ring.network_hop * network_hop;
    best = std::min(best, 1e-6 * latency + passed / (speed * ring.share));
  }
  // A tree between the hosts, a chain in each. All bytes pass twice: to the root and back.
  for (const Protocol& tree : tree_protocols(between_hosts)) {
    if (!is_sum) break;
    const double latency = tree.base_us + 2 * ((per_host - 1) * tree.host_hop * host_hop +
                                               std::log2(num_hosts) * tree.network_hop * network_hop);
    best = std::min(best, 1e-6 * latency + 2 * bytes / (speed * tree.share));
  }
  if (is_sum && !between_hosts && cluster_.device.compute_capability >= 90 && n > 2)
    best = std::min(best,
                    1e-6 * kSwitchSumLatencyUs + passed / (kSwitchSumShare * cluster_.host.gb_per_s * 1e9));
  return {best, between_hosts};
}

CostModel::Transfer CostModel::of_message(double bytes, int from, int to) const {
  const bool between_hosts = host_of(from) != host_of(to);
  const double speed = 1e9 * (between_hosts ? kNetworkShare * cluster_.network.gb_per_s
                                            : kHostLinkShare * cluster_.host.gb_per_s);
  const double latency =
      first_hop_us() + (between_hosts ? cluster_.network.latency_us : cluster_.host.latency_us);
  return {1e-6 * latency + bytes / speed, between_hosts};
}

}  // namespace titan::plan
