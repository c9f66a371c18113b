#pragma once

// Finds where a number that isn't finite comes from, in a run that is known to have one (the search is slow):
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
/// elements; waits for a GPU. Complex numbers count as their two parts. A tensor without memory has its sizes
/// only.
std::string describe_numbers(const at::Tensor& tensor);

/// False when an element is NaN or infinite. Integers are always finite.
bool is_finite(const at::Tensor& tensor);

/// The first parameter whose gradient isn't finite; null: all are.
const Parameter* first_nonfinite_gradient(const std::vector<Parameter>& parameters);

/// The first number of this rank that isn't finite.
struct NanFinding {
  std::string text;
  bool made_by_module = false;  ///< the named module received finite numbers only
  bool in_backward = false;
  size_t model = 0;  ///< index among the searched models
  /// How many module calls and backwards had been checked by then. Ranks that call the same modules (of a
  /// tensor-parallel group) reach the same module at the same number.
  int64_t num_looked_at = 0;
};

/// While it lives, probes in the label slots of the models' modules check every call. They surround what is
/// in the slots already, and so work with FSDP (parameters are gathered when the probes look), with tensor and
/// context parallelism (they see this rank's part), with pipelines (this rank's stages) and with activation
/// checkpointing (a recompute gives what the forward gave).
class NanSearch {
 public:
  /// Note: nothing is thrown, so that no rank waits for this one; first() has the finding.
  enum class OnFinding : uint8_t { Throw, Note };

  struct Options {
    int rank = 0;
    /// Finds the first module whose output, or the gradient of whose input or output, isn't finite. The text
    /// has the module, step and rank, and describe_numbers() of what came out, what went in, and the module's
    /// own parameters. For a backward it also has the inputs of its forward, which are kept until then. Each
    /// call waits for a GPU.
    bool modules = true;
    /// Finds the first autograd operation that turns finite gradients into one that isn't finite. The error
    /// has the operation, the module whose forward recorded it, step and rank. Always throws. Turns
    /// LibTorch's anomaly mode on for the whole process: it prints the stack of that forward, and finds NaN
    /// in operations that no module recorded.
    bool operations = false;
    OnFinding on_finding = OnFinding::Throw;
  };

  NanSearch(const std::vector<nn::AnyRef>& models, const Options& options);
  ~NanSearch();
  NanSearch(const NanSearch&) = delete;
  NanSearch& operator=(const NanSearch&) = delete;

  /// For messages.
  void set_step(int64_t step);

  /// The first finding, once the backward has returned.
  std::optional<NanFinding> first() const;

  /// Throws Error that names the first parameter whose gradient isn't finite. To be called after the
  /// backward: weight gradients don't pass through the modules' inputs and outputs.
  void check_gradients(const std::vector<Parameter>& parameters) const;

  class State;

 private:
  std::vector<nn::AnyRef> models_;
  std::shared_ptr<State> state_;
  bool anomaly_mode_was_on_ = false;
};

}  // namespace titan::train
