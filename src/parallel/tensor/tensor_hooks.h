#pragma once

// What a plan hangs into the PrepareInput and PrepareOutput slots.

#include <cstddef>
#include <vector>

#include "parallel/tensor/conversion.h"
#include "titan/nn/hooks.h"

namespace titan::tp {

/// Converts the floating-point tensors of a call with these numbers. Results without dimensions (a loss) are
/// left alone. `style`: a literal, the name of the plan's style that asked for it.
class ConversionHook final : public nn::CallHook {
 public:
  ConversionHook(Conversion conversion, std::vector<size_t> tensors, const char* style)
      : conversion_(std::move(conversion)), tensors_(std::move(tensors)), style_(style) {}

  void pre_forward(nn::HookHost& host, const nn::TensorRefs& inputs) override {
    convert(host, inputs, "argument");
  }
  void post_forward(nn::HookHost& host, const nn::TensorRefs& outputs) override {
    convert(host, outputs, "result");
  }

  const Conversion& conversion() const { return conversion_; }
  const char* style() const { return style_; }

 private:
  void convert(nn::HookHost& host, const nn::TensorRefs& tensors, const char* what) const;

  Conversion conversion_;
  std::vector<size_t> tensors_;
  const char* style_;
};

/// Sums the gradient of `param` over the axis as autograd delivers it, unless a group of fully_shard (which
/// does so itself) owns it.
void sum_gradient(nn::HookHost& host, const at::Tensor& param, std::shared_ptr<const TpGroup> group,
                  const char* module);

}  // namespace titan::tp
