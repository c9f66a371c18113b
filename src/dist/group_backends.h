#pragma once

// What carries a group's calls.

#include <functional>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace titan::dist {

struct GroupBackends {
  using Pointer = c10::intrusive_ptr<c10d::Backend>;

  Pointer main;
  /// Where `main` serves device tensors only (NCCL): makes the one for CPU tensors at their first use. All
  /// members come to it at the same call. Empty where `main` serves both.
  std::function<Pointer()> make_host;
  Pointer host;

  c10d::Backend& for_tensor(const at::Tensor& tensor) {
    if (!make_host || (tensor.defined() && !tensor.is_cpu())) return *main;
    if (!host) host = make_host();
    return *host;
  }
};

}  // namespace titan::dist
