#pragma once

// [Note: the time of an operation]
// What an operation would take on a device, alone:
// - a product: its FLOPs by the device's peak and the share of it that its shape reaches, or its bytes by the memory's speed, whichever takes
//   longer. The share comes from measured points of the device's file; between them it follows how many tiles of the result each
//   multiprocessor computes, and how long one is worked on (share_of_tiles in cost_model.cpp);
// - attention: its FLOPs, by measured shares for lengths of sequences and sizes of heads;
// - a copy between the host's memory and the device: its bytes, by kPcieShare of the bus's speed;
// - everything else: its bytes, by kMemoryShare of the memory's speed;
// - a collective: the least of NCCL's three protocols, each by its latency for every hop of a ring, and by the speed of the slower of the host's
//   links and the network (the model of NCCL's own tuner, src/graph/tuning.cc in NVIDIA/nccl); on a CPU, a ring with the measured latency and speed;
// and each kernel launch_us more; on a CPU, where the host is the device, at least the host's time for a launch, times the ranks on a core. What
// runs at the same time and what waits is the simulation's (simulation.h).

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "plan/cluster.h"
#include "plan/trace.h"

namespace titan::plan {

/// The share of the memory's data sheet that a long copy reaches: about 3.0 of 3.35 TB/s on an H100.
constexpr double kMemoryShare = 0.9;
/// The share of NVLink that NCCL's rings reach: 340 to 370 of 450 GB/s on 8 H100 (NVIDIA/nccl, issue 1218), 235 of 300 on 8 A100.
constexpr double kHostLinkShare = 0.8;
/// The share of PCIe's data sheet that a long copy from or to pinned memory reaches. An assumption.
constexpr double kPcieShare = 0.85;
/// How much longer computation takes while a collective runs on the same device, whose kernels take multiprocessors and memory's speed: the
/// average that arXiv 2507.03114 measured on GPUs.
constexpr double kContention = 0.189;
constexpr double kContentionOnCpu = 0.1;  ///< an assumption

/// The owner of a step's kernels.
enum class Kernels : uint8_t {
  Ours,      ///< LibTitan's: what is launched
  Compiled,  ///< torch.compile's, of the same step
  Eager      ///< PyTorch's own, one for each operation
};

enum class KernelKind : uint8_t { Product, Attention, Other };
KernelKind kind_of(const Launch& launch, std::string_view name);

class CostModel {
 public:
  CostModel(const ClusterSpec& cluster, Kernels kernels);

  struct KernelTime {
    double seconds = 0;   ///< on the device, with launch_us for each launch
    double launches = 1;  ///< which the host makes one by one
  };
  KernelTime of(const Launch& launch, std::string_view name) const;

  /// Whether it is a copy by the device's copy engines, which takes nothing from its kernels. A CPU's ranks have no such engine.
  bool is_copy_over_bus(std::string_view name) const;

  /// The copies that PyTorch makes after a gather, or before a reduction: FSDP's of parameters and gradients, and tensor parallelism's of a
  /// batch's rows, which ours sends as several tensors. 0 with our kernels.
  KernelTime of_copies(const Trace& trace, const Collective& call) const;

  /// The host's time for each launch. 0 on a CPU, where it is part of the kernel's.
  double host_seconds() const;

  /// How long a collective takes, and which links it uses.
  struct Transfer {
    double seconds = 0;
    bool between_hosts = false;
  };
  Transfer of(std::string_view op, double bytes, const std::vector<int>& world_ranks) const;
  /// From one rank to another.
  Transfer of_message(double bytes, int from, int to) const;
  /// How much later a call of ranks that share cores begins, if they have computed for so long since their last one.
  double late_seconds(double computed) const;

  double contention() const { return cluster_.device.is_cpu ? kContentionOnCpu : kContention; }

  const ClusterSpec& cluster() const { return cluster_; }

  /// The share of the peak that a product reaches.
  double share_of_product(const train::ProductShape& shape, c10::ScalarType dtype) const;

 private:
  double host_us() const;
  double launch_seconds() const;
  double seconds_of_bytes(double bytes) const;
  double share_of_attention(const train::ProductShape& shape, bool is_backward) const;
  int host_of(int world_rank) const;
  double first_hop_us() const;

  /// A point of the device's file: the logarithms of its sizes, and how much faster it was than tiles say.
  struct MeasuredProduct {
    double m, n, k, factor;
  };

  ClusterSpec cluster_;
  Kernels kernels_;
  std::map<std::string, std::vector<MeasuredProduct>> measured_;  // by dtype
};

}  // namespace titan::plan
