#pragma once

// Delayed scaling: a matrix's scale is made of the largest magnitudes that the same matrix had in the last
// steps (Micikevicius et al., "FP8 Formats for Deep Learning"; torchao's and Transformer Engine's recipe).
//
// [Note: delayed scales] Each layer has three histories: of its input, its weight, and its output's gradient.
// A cast reads the largest value of its history and notes its own magnitude as pending; just before the
// optimizer's step update() makes the pending ones those of all ranks, in one reduction for all layers, and
// moves them into the histories. Nothing waits for the device. What differs from dynamic scales:
//   - within a step a scale is the same on all ranks and in all micro-batches, without a collective a cast;
//   - a matrix that outgrows its history saturates in that step;
//   - before the first update(), and as long as a history holds zeros alone, a cast is dynamic.
// A matrix that isn't finite gets a NaN scale (saturation would hide an infinity), and isn't remembered.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/ops/products.h"

namespace torch::nn {
class Module;
}

namespace titan::float8 {

/// What a cast reads and writes of its history: scalars, fp32. Undefined until somebody collects them.
struct DelayedScale {
  at::Tensor largest;  ///< of the history; 0: there is none
  at::Tensor pending;  ///< of this step so far
  bool defined() const { return largest.defined(); }
};

/// Of a linear layer. `ready`: update() has been called, so ranks agree.
struct LayerScales {
  DelayedScale input, weight, grad_output;
  bool ready = false;
};

/// amax [] to its scale [] (float8/cast.h), by `history`; notes it as pending if `records`.
at::Tensor delayed_scale(const at::Tensor& amax, const DelayedScale& history, at::ScalarType dtype,
                         bool power_of_two, bool records);

/// Of a layer with these products; null where nothing is delayed.
std::shared_ptr<LayerScales> layer_scales(const ops::Products& products);

/// All layers' histories, side by side.
class DelayedScales {
 public:
  struct Layer {
    std::string fqn;
    std::shared_ptr<LayerScales> scales;
  };

  /// Of all linear layers below `roots`, empty histories of `history_len` steps on `device`.
  static DelayedScales collect(const std::vector<torch::nn::Module*>& roots, int64_t history_len,
                               at::Device device);

  bool empty() const { return layers_.empty(); }
  const std::vector<Layer>& layers() const { return layers_; }
  /// [3, history_len] of layer i: input, weight, output's gradient; the newest first. Shares memory.
  at::Tensor history(size_t i) const;

  /// `reduce_max`: makes a tensor the largest of all ranks that have these layers, element by element.
  void update(const std::function<void(const at::Tensor&)>& reduce_max);
  /// The histories were written.
  void loaded();

 private:
  void refresh();

  std::vector<Layer> layers_;
  at::Tensor history_;            // [3 layers, history_len]
  at::Tensor largest_, pending_;  // [3 layers]
};

}  // namespace titan::float8
