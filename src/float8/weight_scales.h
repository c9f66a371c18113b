#pragma once

// Scales of weights, which only change with the weights.

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

namespace titan::float8 {

/// Of one layer's weight, by its memory and version, so that the products of a step, its micro-batches and
/// recomputes find a weight's largest magnitude once: one pass over the weight, and with tensor parallelism
/// one collective. Whoever gives a parameter other values without an operation of LibTorch raises its
/// version, as FSDP does. With another weight all is right, and made anew. Thread-safe.
class WeightScales {
 public:
  /// What `make` returned for these values and this `kind` of scale.
  at::Tensor of(const at::Tensor& weight, int64_t kind, const std::function<at::Tensor()>& make);

 private:
  using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Entry {
    int64_t kind = 0;
    Storage storage;     // its address isn't another's while this is here
    int64_t offset = 0;  // of the weight in it
    uint64_t version = 0;
    at::Tensor scale;
  };

  std::mutex mutex_;
  std::vector<Entry> entries_;  // one a kind: one or two
};

}  // namespace titan::float8
