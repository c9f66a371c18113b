#pragma once

#include "parallel/activation_checkpoint/budget.h"
#include "parallel/activation_checkpoint/parameter_storages.h"
#include "parallel/activation_checkpoint/saved_tensor_hooks.h"

namespace titan::activations {

/// Counts what graphs made in its HooksScope save, each storage once and parameters not: on any device, meta
/// too. The graphs are for counting only, and hold nothing for a backward.
class SavedBytes final : public SavedTensorHooks {
 public:
  explicit SavedBytes(const torch::nn::Module& module) : parameters_(module) { install_saved_tensor_hooks(); }
  std::unique_ptr<SavedVariableHooks> make() override;
  int64_t total() const { return bytes_.total(); }

 private:
  class Counter;
  ParameterStorages parameters_;
  StorageBytes bytes_;
};

}  // namespace titan::activations
