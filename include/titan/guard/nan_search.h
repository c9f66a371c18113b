#pragma once

// Finds the source of a non-finite number, in a run that is known to have one (the search is slow):
//
//   titan::train::NanSearch search({model}, {.rank = rank});
//   search.set_step(step);
//   model.loss(tokens, labels, count).backward();  // throws Error that names the module, step and rank

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/nn/hooks.h"
#include "titan/parallel/parameters.h"

namespace titan::train {

/// "float32 [2, 48]: min -1.5, max 3, mean 0.25, 2 NaN, 0 Inf", with min, max and mean of the finite
/// elements; waits for a GPU. A complex number counts as its two parts. For a tensor without memory: only
/// dtype and sizes.
std::string describe_numbers(const at::Tensor& tensor);

/// False if an element is NaN or infinite. Integers are always finite.
bool is_finite(const at::Tensor& tensor);

/// The first parameter with a non-finite gradient; null: none.
const Parameter* first_nonfinite_gradient(const std::vector<Parameter>& parameters);

/// The first non-finite number on this rank.
struct NanFinding {
  std::string text;
  bool made_by_module = false;  ///< the named module received finite numbers only
  bool in_backward = false;
  size_t model = 0;  ///< index among the searched models
  /// Number of module calls and backwards checked by then. Ranks that call the same modules (those of a
  /// tensor-parallel group) have the same number at the same module.
  int64_t num_checked = 0;
};

/// While it lives, probes in the label slots of the models' modules check every call. They wrap the hooks
/// that are already there, and so work with FSDP (parameters are gathered when the probes look), with tensor
/// and context parallelism (they see this rank's part), with pipelines (this rank's stages) and with
/// activation checkpointing (a recompute returns the forward's numbers).
class NanSearch {
 public:
  /// Note: nothing is thrown, so that no other rank waits for this one; first() returns the finding.
  enum class OnFinding : uint8_t { Throw, Note };

  struct Options {
    int rank = 0;
    /// Finds the first module with a non-finite output, or a non-finite gradient of its inputs or outputs.
    /// The text has the module, step and rank, and describe_numbers() of its outputs, inputs and own
    /// parameters. For a backward it also has the inputs of its forward, which are kept until then. Each call
    /// waits for a GPU.
    bool modules = true;
    /// Finds the first autograd operation that turns finite gradients into a non-finite one. The error has
    /// the operation, the module whose forward recorded it, step and rank. Always throws. Turns LibTorch's
    /// anomaly mode on for the whole process: it prints the stack of that forward, and finds NaN in
    /// operations that no module recorded.
    bool operations = false;
    OnFinding on_finding = OnFinding::Throw;
  };

  NanSearch(const std::vector<nn::AnyRef>& models, const Options& options);
  ~NanSearch();
  NanSearch(const NanSearch&) = delete;
  NanSearch& operator=(const NanSearch&) = delete;

  /// The current step, for messages.
  void set_step(int64_t step);

  /// The first finding, once the backward has returned.
  std::optional<NanFinding> first() const;

  /// Throws Error that names the first parameter with a non-finite gradient. Call it after the backward:
  /// weight gradients don't pass through the modules' inputs and outputs.
  void check_gradients(const std::vector<Parameter>& parameters) const;

  class State;

 private:
  std::vector<nn::AnyRef> models_;
  std::shared_ptr<State> state_;
  bool anomaly_mode_was_on_ = false;
};

}  // namespace titan::train
