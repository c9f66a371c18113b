#pragma once

// The machines of a plan: a device, the host that it is in, and the network between hosts (configs/devices/*.toml).

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

namespace titan::plan {

struct DeviceSpec {
  std::string name;
  bool is_cpu = false;              ///< without a GPU's streams, batches of calls and workspaces of cuBLAS
  double memory_gib = 0;            ///< as the driver reports it
  int64_t compute_capability = 90;  ///< 9.0
  int64_t multiprocessors = 132;
  double memory_gb_per_s = 0;  ///< by the data sheet
  double launch_us = 0;        ///< from the end of a kernel to the start of the next one on its stream
  double power = 1;  ///< share of its speed that it keeps under its power limit, in products and attention
  /// How many times as fast a rank computes while the others of its host wait: processes that share a CPU's cores. 1: a device of its own.
  double alone = 1;
  /// Dense peak by dtype, from the data sheet. Two-byte floating-point types have that of bfloat16.
  std::map<std::string, double> tflops;

  /// Measured: what share of the peak a product [m, k] x [k, n] reaches.
  struct ProductPoint {
    std::string dtype;
    int64_t m = 0, n = 0, k = 0;
    double share = 0;
  };
  std::vector<ProductPoint> efficiency;

  /// Measured: the shares of the peak that causal attention over sequences of this length reaches.
  struct AttentionPoint {
    int64_t sequence = 0;
    double forward = 0, backward = 0;
    std::string kernel;      ///< "cudnn" or "flash"; "" for both
    int64_t features = 128;  ///< a head's
  };
  std::vector<AttentionPoint> attention;

  /// Without what a CUDA context takes.
  int64_t usable_bytes() const;
  /// FLOP/s at the peak; throws Error for a dtype that the device's file doesn't have.
  double peak_flops(c10::ScalarType dtype) const;
};

struct ClusterSpec {
  DeviceSpec device;
  struct Host {
    int64_t devices = 1;
    double gb_per_s = 0;        ///< between two devices: in one direction, of one device
    double latency_us = 0;      ///< one hop of a ring
    double pcie_gb_per_s = 64;  ///< between the host's memory and a device, in one direction
    /// Ranks that share a CPU's cores come to a call one after another: a collective or a send takes longer by this share of the time that
    /// its rank has computed since the last one, at most by late_us.
    double late_share = 0, late_us = 0;
  } host;
  std::vector<std::string> assumed;  ///< keys of the device that its file leaves out, with an H100's values
  struct Network {
    double gb_per_s = 0;    ///< one device's share, in one direction
    double latency_us = 0;  ///< one hop between hosts
  } network;
};

}  // namespace titan::plan
