#pragma once

// Measuring devices for the tests of activation checkpointing, and a small Llama.

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "memory_meter.h"
#include "titan/models/llama3.h"
#include "titan/nn/hooks.h"
#include "titan/nn/layers.h"
#include "titan/ops/linear.h"
#include "titan/parallel/activation_checkpoint.h"

namespace titan::testing {

/// Plain products that record which weights they multiply.
class CountingProducts : public ops::Products {
 public:
  at::Tensor forward(const ops::Operand& x, const ops::Operand& weight) const override {
    count(x.values, weight.values);
    multiplied.push_back(weight.values.unsafeGetTensorImpl());
    return plain_->forward(x, weight);
  }
  at::Tensor grad_input(const ops::Operand& grad, const ops::Operand& weight) const override {
    count(grad.values, weight.values);
    return plain_->grad_input(grad, weight);
  }
  at::Tensor grad_weight(const ops::Operand& grad, const ops::Operand& x) const override {
    multiplications += grad.values.size(0) * grad.values.size(1) * x.values.size(1);
    return plain_->grad_weight(grad, x);
  }
  void reset() const {
    multiplications = 0;
    multiplied.clear();
  }
  mutable int64_t multiplications = 0;
  mutable std::vector<const c10::TensorImpl*> multiplied;  // weights of forward products

 private:
  void count(const at::Tensor& rows, const at::Tensor& weight) const {
    multiplications += rows.size(0) * weight.numel();
  }
  std::shared_ptr<const ops::Products> plain_ = ops::default_products();
};

inline models::Llama3Args small_llama(int64_t num_layers = 2) {
  return {.dim = 32,
          .n_layers = num_layers,
          .n_heads = 4,
          .n_kv_heads = 2,
          .vocab_size = 64,
          .multiple_of = 16,
          .max_seq_len = 16};
}

inline std::vector<nn::AnyRef> layers_of(const models::Llama3& model) {
  return {model->layers.begin(), model->layers.end()};
}

struct StepResult {
  at::Tensor loss;
  std::vector<at::Tensor> gradients;
};

inline void forget_gradients(const models::Llama3& model) {
  for (const at::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();
}

inline at::Tensor loss_of(const models::Llama3& model, int micro_batch = 0) {
  const at::Tensor tokens = (at::arange(48) + 7 * micro_batch).remainder(61).view({3, 16});
  return model(tokens, tokens.roll(-1), int64_t{48});
}

inline StepResult result_of(const models::Llama3& model, at::Tensor loss) {
  StepResult result{std::move(loss), {}};
  for (const at::Tensor& parameter : model->parameters()) result.gradients.push_back(parameter.grad());
  return result;
}

/// Runs `steps` forwards and backwards over fixed tokens and returns the last one's result.
inline StepResult run_steps(const models::Llama3& model, int steps = 1) {
  at::Tensor loss;
  for (int step = 0; step < steps; ++step) {
    forget_gradients(model);
    loss = loss_of(model);
    loss.backward();
  }
  return result_of(model, loss);
}

/// The same with forwards and backwards of several micro-batches, as pipelines order them: "F0 F1 B0 B1".
inline StepResult run_order(const models::Llama3& model, const std::string& order, int steps = 1) {
  at::Tensor sum;
  for (int step = 0; step < steps; ++step) {
    forget_gradients(model);
    sum = at::zeros({});
    std::map<int, at::Tensor> losses;
    std::istringstream actions(order);
    for (std::string action; actions >> action;) {
      const int micro_batch = std::stoi(action.substr(1));
      if (action[0] == 'F') {
        losses[micro_batch] = loss_of(model, micro_batch);
      } else {
        losses[micro_batch].backward();
        sum += losses[micro_batch].detach();
        losses.erase(micro_batch);
      }
    }
  }
  return result_of(model, sum);
}

/// Orders: one after the other; all forwards first, with backwards in either order; 1F1B of two stages; the
/// first micro-batch late.
inline const std::vector<std::string> kOrders{"F0 B0 F1 B1 F2 B2", "F0 F1 F2 B0 B1 B2", "F0 F1 F2 B2 B1 B0",
                                              "F0 F1 B0 F2 B1 B2", "F0 F1 B1 F2 B2 B0"};

inline bool bit_equal(const StepResult& a, const StepResult& b) {
  if (!a.loss.equal(b.loss) || a.gradients.size() != b.gradients.size()) return false;
  for (size_t i = 0; i < a.gradients.size(); ++i)
    if (!a.gradients[i].equal(b.gradients[i])) return false;
  return true;
}

}  // namespace titan::testing
