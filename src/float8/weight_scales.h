#pragma once

// Scales of weights, which only change with the weights.

#include <cstdint>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

namespace titan::float8 {

/// By a weight's memory and version, so that the products of a step, its micro-batches and recomputes find a
/// weight's largest magnitude once: one pass over the weight, and with tensor parallelism one collective.
/// Whoever gives a parameter other values without an operation of LibTorch raises its version, as FSDP does.
/// Thread-safe.
class WeightScales {
 public:
  /// What `make` returned for these values and this `kind` of scale.
  at::Tensor of(const at::Tensor& weight, int64_t kind, const std::function<at::Tensor()>& make);

 private:
  struct Entry {
    int64_t kind = 0, offset = 0;  // of the scale; of the weight in its memory
    uint64_t version = 0;
    at::Tensor scale;
  };
  struct Weights {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // its address isn't another's while this is here
    std::vector<Entry> entries;
  };

  std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Weights> weights_;
};

}  // namespace titan::float8
