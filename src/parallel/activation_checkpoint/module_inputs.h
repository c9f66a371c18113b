#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/autograd/saved_variable.h>

#include "titan/nn/hooks.h"

namespace titan::activations {

/// What a checkpointed module was called with, for the calls that repeat it. Kept as any tensor that autograd
/// saves: a checkpoint around this one may compute them again in its turn.
class ModuleInputs {
 public:
  /// `module`: its name, for errors; outlives this.
  ModuleInputs(const nn::TensorList& inputs, const std::string& module);
  /// The forward is over. Throws Error when it has written to one of `inputs`, which are those of the
  /// constructor, and lets go of them: a written input may own the graph that owns this.
  void check_unwritten(const nn::TensorList& inputs);
  /// Leaves of the same values. Throws Error when one was written to since.
  nn::TensorList detached() const;

 private:
  struct Input {
    torch::autograd::SavedVariable saved;
    int64_t version;
  };
  [[noreturn]] void refuse_written(size_t number) const;

  std::vector<Input> inputs_;
  const std::string& module_;
};

/// Where a module computes: the device of the first input that isn't in host memory (token ids may be).
at::Device compute_device(const nn::TensorList& inputs);

}  // namespace titan::activations
