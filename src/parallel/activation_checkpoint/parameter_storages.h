#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace titan::activations {

/// The storages of a module's parameters and buffers: what a graph saves of them is no activation. A sharded
/// parameter keeps its storage object while its memory comes and goes.
class ParameterStorages {
 public:
  ParameterStorages() = default;
  explicit ParameterStorages(const torch::nn::Module& module);
  bool contains(const at::Tensor& tensor) const;

 private:
  std::vector<const c10::StorageImpl*> storages_;  // sorted
};

}  // namespace titan::activations
