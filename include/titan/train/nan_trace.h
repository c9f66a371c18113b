#pragma once

// Where a number that isn't finite came from. Two tools for a run that has them, both slow:
//   NanTrace      the first module whose output, or whose gradient, isn't finite, with what it was given
//   AnomalyTrace  the first operation of autograd that does so in a backward, the module whose forward made
//                 it, and LibTorch's own anomaly mode, which prints where in the program that was
// Both sit in the modules' label slots, around what is there, and so work with FSDP (parameters are gathered
// when they look), tensor and context parallelism (they see this rank's part), pipelines (this rank's stages)
// and activation checkpoints (a recompute gives what the forward gave).

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/nn/hooks.h"

namespace titan::train {

/// "float32 [2, 48]: min -1.5, max 3, mean 0.25, 2 NaN, 0 Inf", numbers of its finite elements; waits for a
/// GPU. Of complex ones, of both their parts. A tensor without memory: sizes alone.
std::string describe_numbers(const at::Tensor& tensor);

/// False: an element is NaN or infinite. Integers always are.
bool is_finite(const at::Tensor& tensor);

/// The first number of this rank that isn't finite.
struct NanFinding {
  std::string text;
  bool made_by_module = false;  ///< the module that it names was given finite numbers
  bool in_backward = false;
  size_t model = 0;  ///< of those that are traced
  /// How many calls and backwards of modules were looked at until then: ranks that call the same modules (of
  /// a tensor-parallel group) come to the same one at the same number.
  int64_t num_looked_at = 0;
};

/// While it lives, a call of a module below the models' roots throws Error when an output isn't finite, and a
/// backward when the gradient of a module's input or output isn't. The first to throw is the innermost module
/// that made it; the message names module, step and rank, and has describe_numbers() of what came out, what
/// went in, and the module's own parameters; of a backward, of what its forward was given too, which it keeps
/// until then. Each call waits for a GPU.
class NanTrace {
 public:
  /// Note: a finding isn't thrown, so that no rank waits for this one; first() has it.
  enum class OnFinding : uint8_t { Throw, Note };
  NanTrace(const std::vector<nn::AnyRef>& models, int rank, OnFinding on_finding = OnFinding::Throw);
  ~NanTrace();
  NanTrace(const NanTrace&) = delete;
  NanTrace& operator=(const NanTrace&) = delete;

  /// For messages.
  void set_step(int64_t step);

  /// What was noted, once the backward has returned.
  std::optional<NanFinding> first() const;

  class State;

 private:
  std::vector<nn::AnyRef> models_;
  std::shared_ptr<State> state_;
};

/// While it lives, a backward throws Error when an operation makes a gradient that isn't finite of gradients
/// that are; the message names the operation, the module in whose forward it was recorded, step and rank.
/// LibTorch's anomaly mode is on for the whole process: it prints the stack of that forward, and finds NaN in
/// what no module recorded.
class AnomalyTrace {
 public:
  AnomalyTrace(const std::vector<nn::AnyRef>& models, int rank);
  ~AnomalyTrace();
  AnomalyTrace(const AnomalyTrace&) = delete;
  AnomalyTrace& operator=(const AnomalyTrace&) = delete;

  void set_step(int64_t step);

  class State;

 private:
  std::vector<nn::AnyRef> models_;
  std::shared_ptr<State> state_;
  bool was_on_;
};

}  // namespace titan::train
