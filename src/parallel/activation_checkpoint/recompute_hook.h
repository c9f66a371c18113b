#pragma once

#include <memory>

#include "parallel/activation_checkpoint/recompute_frame.h"
#include "titan/nn/hooks.h"

namespace titan::activations {

/// FullRecompute, or with `products` SelectiveOp.
class RecomputeHook final : public nn::CheckpointHook {
 public:
  explicit RecomputeHook(const CheckpointOptions& options, std::shared_ptr<ProductChoice> products = nullptr)
      : options_(options), products_(std::move(products)) {}
  nn::TensorList call(nn::HookHost& host, const nn::TensorList& inputs, Run run) override;

 private:
  CheckpointOptions options_;
  std::shared_ptr<ProductChoice> products_;
};

}  // namespace titan::activations
