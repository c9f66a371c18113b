#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace titan::activations {

/// Where LibTorch's default generators of the CPU and of `device` stand.
class RngState {
 public:
  explicit RngState(at::Device device);
  /// False when something has drawn from one of them since.
  bool is_current() const;
  void restore() const;

 private:
  struct Entry {
    at::Generator generator;
    at::Tensor state;
  };
  std::vector<Entry> entries_;
};

/// Sets the generators back to `state` (null: leaves them alone) and, at the end, to where they stood.
class ScopedRngState {
 public:
  ScopedRngState(const RngState* state, at::Device device);
  ~ScopedRngState();
  ScopedRngState(const ScopedRngState&) = delete;
  ScopedRngState& operator=(const ScopedRngState&) = delete;

 private:
  std::unique_ptr<const RngState> outer_;
};

}  // namespace titan::activations
