#include "parallel/activation_checkpoint/parameter_storages.h"

#include <algorithm>

#include <torch/nn/module.h>

namespace titan::activations {

ParameterStorages::ParameterStorages(const torch::nn::Module& module) {
  for (const auto& list : {module.parameters(), module.buffers()})
    for (const at::Tensor& tensor : list)
      if (tensor.has_storage()) storages_.push_back(tensor.storage().unsafeGetStorageImpl());
  std::sort(storages_.begin(), storages_.end());
}

bool ParameterStorages::contains(const at::Tensor& tensor) const {
  return tensor.has_storage() &&
         std::binary_search(storages_.begin(), storages_.end(), tensor.storage().unsafeGetStorageImpl());
}

}  // namespace titan::activations
