#pragma once

// MemoryBudget: its arithmetic, from sizes and times to one level per layer, and the hooks that measure and
// apply it.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include <c10/core/Storage.h>

#include "parallel/activation_checkpoint/saved_tensor_hooks.h"
#include "titan/nn/hooks.h"
#include "titan/parallel/activation_checkpoint.h"

namespace titan::activations {

/// How much a layer keeps, least first.
enum class Level { Full, Op, None };

struct LevelCost {
  double bytes = 0;        ///< kept between forward and backward
  double recompute_s = 0;  ///< spent in the backward
};

/// Indexed by Level.
struct LayerCosts {
  LevelCost full, op, none;
  const LevelCost& at(Level level) const;
};

/// Gives layers of equal sizes the smallest of their measured times and of their savings by Op, because a
/// single measurement is noisy.
void equalize_times(std::vector<LayerCosts>& layers);

/// The levels of least total recompute time within `budget_bytes`; exact but for the rounding of sizes to
/// 1/16384 of the budget. Among layers of equal sizes the later ones keep more. Throws Error if the budget
/// is smaller than what Full keeps.
std::vector<Level> choose_levels(const std::vector<LayerCosts>& layers, double budget_bytes);

/// `bytes`; if that is negative, the point at `fraction` between keeping the least and keeping everything.
double budget_bytes_of(const std::vector<LayerCosts>& layers, int64_t bytes, double fraction);

/// A table for the log.
std::string describe_choice(const std::vector<LayerCosts>& layers, const std::vector<Level>& levels,
                            double budget_bytes);

/// Sums the bytes of tensors, counting each storage once.
class StorageBytes {
 public:
  void add(const at::Tensor& tensor);
  bool has(const at::Tensor& tensor) const;
  int64_t total() const { return total_; }

 private:
  std::unordered_set<const c10::StorageImpl*> seen_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> alive_;  // so that no address is reused
  int64_t total_ = 0;
};

/// Makes a layer's hook. `number` is the layer's index in the list.
using LayerHooks = std::function<std::shared_ptr<nn::CheckpointHook>(size_t number, const nn::AnyRef& layer)>;

/// Measures layers while they run with FullRecompute, then gives each its level.
LayerHooks budget_hooks(const MemoryBudget& budget, size_t num_layers,
                        const ActivationCheckpointOptions& options);

/// Counts the bytes saved by graphs made in its HooksScope, on any device including meta. Each storage counts
/// once, parameters don't count. Such a graph holds no tensors, so it can't run backward.
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
