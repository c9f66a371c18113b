#pragma once

// MemoryBudget's arithmetic: sizes and times in, one level per layer out. No tensors.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <c10/core/Storage.h>

#include "parallel/activation_checkpoint/recompute.h"
#include "parallel/activation_checkpoint/saved_tensor_hooks.h"
#include "titan/nn/hooks.h"

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

/// Gives layers of the same sizes the least of their measured times, and of their savings by Op, because a
/// single measurement is noisy.
void equalize_times(std::vector<LayerCosts>& layers);

/// The levels of least total recompute time within `budget_bytes`; exact but for the rounding of sizes to
/// 1/16384 of the budget. Of layers of the same sizes the later ones keep more. Throws Error where the budget
/// doesn't hold what Full keeps.
std::vector<Level> choose_levels(const std::vector<LayerCosts>& layers, double budget_bytes);

/// bytes, or where that is negative, by the fraction between keeping least and keeping everything.
double budget_bytes_of(const std::vector<LayerCosts>& layers, int64_t bytes, double fraction);

/// A table for the log.
std::string describe_choice(const std::vector<LayerCosts>& layers, const std::vector<Level>& levels,
                            double budget_bytes);

// MemoryBudget: measures layers while they run with FullRecompute, then gives each its level.

/// Bytes of the tensors added to it, each storage once.
class StorageBytes {
 public:
  void add(const at::Tensor& tensor);
  bool has(const at::Tensor& tensor) const;
  int64_t total() const { return total_; }

 private:
  std::unordered_set<const c10::StorageImpl*> seen_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> alive_;  // so that none takes another's address
  int64_t total_ = 0;
};

/// [Note: measuring a layer]
/// One forward with FullRecompute measures all three levels: keeping everything costs the storages that the
/// graph would have saved; the operations that SelectiveOp would keep are timed as they run; the recompute is
/// timed as a whole, and SelectiveOp's recompute is that time minus those operations.
class LayerProbe final : public FrameObserver, private ops::SavedOutputs {
 public:
  LayerProbe(std::shared_ptr<ProductChoice> products, std::shared_ptr<const ParameterStorages> parameters,
             const nn::TensorList& inputs);

  ops::SavedOutputs* outputs() override { return this; }
  void saved(const at::Tensor& tensor) override;
  void recomputing() override;
  void recomputed() override;

  /// Empty until the recompute has been timed.
  std::optional<LayerCosts> costs() const;

 private:
  struct Kept {
    double bytes, seconds;
    size_t num_saved;
  };
  Action next(ops::KeptKind kind, const at::Tensor& weight) override;
  void keep(const at::Tensor& output) override;
  at::Tensor hand_back() override;
  double seconds_since_start() const;

  std::shared_ptr<ProductChoice> products_;
  std::shared_ptr<const ParameterStorages> parameters_;
  at::Device device_;
  StorageBytes inputs_, saved_;
  size_t num_saved_ = 0;
  std::vector<Kept> kept_;
  std::chrono::steady_clock::time_point start_;
  std::optional<double> recompute_s_;
};

/// The layers' measurements, then their levels. Several forwards may be under way before the first backward:
/// a layer's newest counts, so the choice is made when the first layer's forward finds that one's backward
/// over.
class BudgetPlan {
 public:
  BudgetPlan(MemoryBudget budget, size_t num_layers) : budget_(std::move(budget)), probes_(num_layers) {}

  /// A forward of a layer begins; empty: it is to be measured. The first layer's decides, once all are
  /// measured.
  std::optional<Level> level_of(size_t layer);
  void measure(size_t layer, std::shared_ptr<LayerProbe> probe);

 private:
  bool all_measured() const;
  void agree(std::vector<LayerCosts>& layers) const;
  void decide();

  MemoryBudget budget_;
  std::vector<std::shared_ptr<LayerProbe>> probes_;  // of each layer's newest forward
  std::vector<Level> levels_;                        // empty: not decided
};

class BudgetHook final : public nn::CheckpointHook {
 public:
  BudgetHook(std::shared_ptr<BudgetPlan> plan, size_t layer, const ActivationCheckpointOptions& options,
             std::shared_ptr<ProductChoice> products)
      : plan_(std::move(plan)), layer_(layer), options_(options), products_(std::move(products)) {}
  nn::TensorList call(nn::HookHost& host, const nn::TensorList& inputs, Run run) override;

 private:
  nn::TensorList measure(nn::HookHost& host, const nn::TensorList& inputs, Run run);

  std::shared_ptr<BudgetPlan> plan_;
  size_t layer_;
  ActivationCheckpointOptions options_;
  std::shared_ptr<ProductChoice> products_;
  std::shared_ptr<const ParameterStorages> parameters_;
};

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
