#include "parallel/activation_checkpoint/budget.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <iomanip>
#include <limits>
#include <optional>
#include <sstream>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "core/units.h"
#include "dist/stream.h"
#include "parallel/activation_checkpoint/recompute.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::activations {

namespace {

constexpr std::array kLevels{Level::Full, Level::Op, Level::None};
constexpr int64_t kUnits = 16384;

bool same_sizes(const LayerCosts& a, const LayerCosts& b) {
  return a.full.bytes == b.full.bytes && a.op.bytes == b.op.bytes && a.none.bytes == b.none.bytes;
}

double total_bytes(const std::vector<LayerCosts>& layers, Level level) {
  double sum = 0;
  for (const LayerCosts& layer : layers) sum += layer.at(level).bytes;
  return sum;
}

// A knapsack with three choices per layer: best[u] is the least time of the layers so far with u more units
// than Full needs.
std::vector<Level> solve(const std::vector<LayerCosts>& layers, double extra_bytes) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const double unit = extra_bytes / static_cast<double>(kUnits);
  std::vector<double> best(kUnits + 1, 0.0);
  std::vector<std::vector<Level>> taken;
  for (const LayerCosts& layer : layers) {
    std::vector<double> next(kUnits + 1, kNever);
    std::vector<Level> choice(kUnits + 1, Level::Full);
    for (Level level : kLevels) {
      const double bytes = layer.at(level).bytes - layer.full.bytes;
      if (bytes > extra_bytes) continue;
      const auto units = bytes > 0 ? static_cast<int64_t>(std::ceil(bytes / unit)) : 0;
      for (int64_t u = units; u <= kUnits; ++u) {
        const double time = best[static_cast<size_t>(u - units)] + layer.at(level).recompute_s;
        if (time >= next[static_cast<size_t>(u)]) continue;
        next[static_cast<size_t>(u)] = time;
        choice[static_cast<size_t>(u)] = level;
      }
    }
    best = std::move(next);
    taken.push_back(std::move(choice));
  }
  std::vector<Level> levels(layers.size());
  int64_t left = kUnits;
  for (size_t i = layers.size(); i-- > 0;) {
    levels[i] = taken[i][static_cast<size_t>(left)];
    const double bytes = layers[i].at(levels[i]).bytes - layers[i].full.bytes;
    if (bytes > 0) left -= static_cast<int64_t>(std::ceil(bytes / unit));
  }
  return levels;
}

// The backward reaches the last layers first, so their kept tensors are freed before the others recompute.
void keep_in_last_layers(const std::vector<LayerCosts>& layers, std::vector<Level>& levels) {
  std::vector<bool> done(layers.size(), false);
  for (size_t i = 0; i < layers.size(); ++i) {
    if (done[i]) continue;
    std::vector<size_t> members;
    std::vector<Level> theirs;
    for (size_t j = i; j < layers.size(); ++j) {
      if (!same_sizes(layers[i], layers[j])) continue;
      members.push_back(j);
      theirs.push_back(levels[j]);
      done[j] = true;
    }
    std::sort(theirs.begin(), theirs.end());
    for (size_t k = 0; k < members.size(); ++k) levels[members[k]] = theirs[k];
  }
}

const char* name_of(Level level) {
  constexpr const char* kNames[] = {"inputs (full)", "op", "everything"};
  return kNames[static_cast<size_t>(level)];
}

std::string range_of(size_t first, size_t end) {
  return first + 1 == end ? str(first) : str(first, "-", end - 1);
}

}  // namespace

const LevelCost& LayerCosts::at(Level level) const {
  return level == Level::Full ? full : level == Level::Op ? op : none;
}

void equalize_times(std::vector<LayerCosts>& layers) {
  const std::vector<LayerCosts> measured = layers;
  for (LayerCosts& layer : layers) {
    double full_s = layer.full.recompute_s, spared_s = full_s - layer.op.recompute_s;
    for (const LayerCosts& other : measured) {
      if (!same_sizes(layer, other)) continue;
      full_s = std::min(full_s, other.full.recompute_s);
      spared_s = std::min(spared_s, other.full.recompute_s - other.op.recompute_s);
    }
    layer.full.recompute_s = full_s;
    layer.op.recompute_s = std::max(full_s - spared_s, 0.0);
  }
}

std::vector<Level> choose_levels(const std::vector<LayerCosts>& layers, double budget_bytes) {
  const double least = total_bytes(layers, Level::Full);
  TITAN_CHECK(
      budget_bytes >= least, "a memory budget of ", budget_bytes / kMiB,
      " MiB for activations is less than the ", least / kMiB,
      " MiB that full recomputation keeps for the inputs of all layers: raise the budget or use smaller "
      "micro-batches");
  if (total_bytes(layers, Level::None) <= budget_bytes) return std::vector<Level>(layers.size(), Level::None);
  std::vector<Level> levels = solve(layers, std::max(budget_bytes - least, 1.0));
  keep_in_last_layers(layers, levels);
  return levels;
}

double budget_bytes_of(const std::vector<LayerCosts>& layers, int64_t bytes, double fraction) {
  if (bytes >= 0) return static_cast<double>(bytes);
  const double least = total_bytes(layers, Level::Full), most = total_bytes(layers, Level::None);
  // Exact at both ends.
  return fraction >= 1 ? most : least + fraction * (most - least);
}

std::string describe_choice(const std::vector<LayerCosts>& layers, const std::vector<Level>& levels,
                            double budget_bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(1) << "activations within " << budget_bytes / kMiB
      << " MiB for each forward:\n"
      << std::left << std::setw(12) << "layers" << std::setw(16) << "keep" << std::right << std::setw(12)
      << "MiB each" << std::setw(24) << "ms recomputed each";
  LevelCost sum, most;
  for (size_t i = 0, end = 0; i < layers.size(); i = end) {
    const LevelCost& cost = layers[i].at(levels[i]);
    for (end = i; end < layers.size() && levels[end] == levels[i] && same_sizes(layers[end], layers[i]);
         ++end)
      ;
    out << "\n"
        << std::left << std::setw(12) << range_of(i, end) << std::setw(16) << name_of(levels[i]) << std::right
        << std::setw(12) << cost.bytes / kMiB << std::setw(24) << cost.recompute_s * 1e3;
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    sum.bytes += layers[i].at(levels[i]).bytes;
    sum.recompute_s += layers[i].at(levels[i]).recompute_s;
    most.bytes += layers[i].none.bytes;
    most.recompute_s += layers[i].full.recompute_s;
  }
  out << "\ntogether " << sum.bytes / kMiB << " of " << most.bytes / kMiB << " MiB kept, "
      << sum.recompute_s * 1e3 << " of " << most.recompute_s * 1e3 << " ms recomputed";
  return out.str();
}

void StorageBytes::add(const at::Tensor& tensor) {
  if (!tensor.has_storage() || !seen_.insert(tensor.storage().unsafeGetStorageImpl()).second) return;
  alive_.push_back(tensor.storage().getWeakStorageImpl());
  total_ += static_cast<int64_t>(tensor.storage().nbytes());
}

bool StorageBytes::has(const at::Tensor& tensor) const {
  return tensor.has_storage() && seen_.contains(tensor.storage().unsafeGetStorageImpl());
}

namespace {

/// [Note: measuring a layer]
/// One forward with FullRecompute measures all three levels: keeping everything costs the storages that the
/// graph would have saved; the operations that SelectiveOp would keep are timed as they run; the recompute is
/// timed as a whole, and SelectiveOp's recompute is that time minus those operations.
class LayerProbe final : public FrameObserver, private ops::SavedOutputs {
 public:
  LayerProbe(std::shared_ptr<ProductChoice> products, std::shared_ptr<const ParameterStorages> parameters,
             const nn::TensorList& inputs)
      : products_(std::move(products)), parameters_(std::move(parameters)), device_(compute_device(inputs)) {
    for (const at::Tensor& input : inputs) inputs_.add(input);
  }

  ops::SavedOutputs* outputs() override { return this; }
  void saved(const at::Tensor& tensor) override {
    ++num_saved_;
    if (!parameters_->contains(tensor) && !inputs_.has(tensor)) saved_.add(tensor);
  }
  void recomputing() override {
    dist::Stream::current(device_).synchronize();
    start_ = std::chrono::steady_clock::now();
  }
  void recomputed() override { recompute_s_ = seconds_since_start(); }

  /// Empty until the recompute has been timed.
  std::optional<LayerCosts> costs() const {
    if (!recompute_s_) return std::nullopt;
    LayerCosts costs;
    const auto inputs = static_cast<double>(inputs_.total());
    costs.full = costs.op = {inputs, *recompute_s_};
    costs.none.bytes = inputs + static_cast<double>(saved_.total());
    for (const Kept& kept : kept_) {
      if (kept.num_saved == num_saved_) continue;  // after the last saved tensor: not kept, and not run again
      costs.op.bytes += kept.bytes;
      costs.op.recompute_s -= kept.seconds;
    }
    return costs;
  }

 private:
  struct Kept {
    double bytes, seconds;
    size_t num_saved;
  };
  Action next(ops::KeptKind kind, const at::Tensor& weight) override {
    if (kind == ops::KeptKind::Product && !products_->keeps(weight)) return Action::Compute;
    recomputing();
    return Action::Keep;
  }
  void keep(const at::Tensor& output) override {
    kept_.push_back({static_cast<double>(output.nbytes()), seconds_since_start(), num_saved_});
    start_ = std::chrono::steady_clock::now();
  }
  at::Tensor hand_back() override {
    TITAN_INTERNAL_ASSERT(false, "a layer that is being measured keeps no results");
  }
  double seconds_since_start() const {
    dist::Stream::current(device_).synchronize();
    return seconds_since(start_);
  }

  std::shared_ptr<ProductChoice> products_;
  std::shared_ptr<const ParameterStorages> parameters_;
  at::Device device_;
  StorageBytes inputs_, saved_;
  size_t num_saved_ = 0;
  std::vector<Kept> kept_;
  std::chrono::steady_clock::time_point start_;
  std::optional<double> recompute_s_;
};

/// The layers' measurements, then their levels. Several forwards may run before the first backward. Only a
/// layer's newest forward counts, so the choice is made when the first layer's forward finds that the newest
/// forwards of all layers have had their backward.
class BudgetPlan {
 public:
  BudgetPlan(MemoryBudget budget, size_t num_layers) : budget_(std::move(budget)), probes_(num_layers) {}

  /// Called when a forward of a layer begins. Returns nothing if the forward has to be measured. The first
  /// layer's call makes the choice once all layers are measured.
  std::optional<Level> level_of(size_t layer) {
    if (levels_.empty() && layer == 0) decide();
    return levels_.empty() ? std::nullopt : std::optional(levels_[layer]);
  }
  void measure(size_t layer, std::shared_ptr<LayerProbe> probe) { probes_[layer] = std::move(probe); }

 private:
  // Checks all ranks, because one rank's backward may have skipped a layer.
  bool all_measured() const {
    const bool here = std::all_of(probes_.begin(), probes_.end(),
                                  [](const auto& probe) { return probe && probe->costs(); });
    return budget_.group ? budget_.group->max(here ? 0.0 : 1.0, {"activations::budget"}) == 0 : here;
  }
  // Takes the maximum of each number over the ranks, so that all ranks make the same choice.
  void agree(std::vector<LayerCosts>& layers) const {
    if (!budget_.group || budget_.group->size() == 1) return;
    const auto visit = [&](const auto& each) {
      for (LayerCosts& layer : layers)
        for (LevelCost* cost : {&layer.full, &layer.op, &layer.none})
          for (double* number : {&cost->bytes, &cost->recompute_s}) each(*number);
    };
    std::vector<double> numbers;
    visit([&](double& number) { numbers.push_back(number); });
    at::Tensor all = at::empty({static_cast<int64_t>(numbers.size())}, at::kDouble);
    std::copy(numbers.begin(), numbers.end(), all.mutable_data_ptr<double>());
    budget_.group->all_reduce(all, dist::ReduceOp::Max, {"activations::budget"}).wait();
    const double* agreed = all.const_data_ptr<double>();
    visit([&](double& number) { number = *agreed++; });
  }
  void decide() {
    if (!all_measured()) return;
    std::vector<LayerCosts> layers;
    for (const auto& probe : probes_) layers.push_back(*probe->costs());
    agree(layers);
    equalize_times(layers);
    const double bytes = budget_bytes_of(layers, budget_.bytes, budget_.fraction);
    levels_ = choose_levels(layers, bytes);
    log::info_rank0(describe_choice(layers, levels_, bytes));
    probes_.clear();
  }

  MemoryBudget budget_;
  std::vector<std::shared_ptr<LayerProbe>> probes_;  // per layer, for its newest forward
  std::vector<Level> levels_;                        // empty: not decided
};

class BudgetHook final : public nn::CheckpointHook {
 public:
  BudgetHook(std::shared_ptr<BudgetPlan> plan, size_t layer, const ActivationCheckpointOptions& options,
             std::shared_ptr<ProductChoice> products)
      : plan_(std::move(plan)), layer_(layer), options_(options), products_(std::move(products)) {}

  nn::TensorList call(nn::HookHost& host, const nn::TensorList& inputs, Run run) override {
    if (!at::GradMode::is_enabled()) return run(inputs);
    const std::optional<Level> level = plan_->level_of(layer_);
    if (level == Level::None) return run(inputs);
    if (!parameters_) parameters_ = std::make_shared<const ParameterStorages>(host.as_module());
    if (!without_buffers_)
      without_buffers_ =
          std::make_shared<const ParameterStorages>(host.as_module(), ParameterStorages::Buffers::Without);
    RecomputeParts parts{.parameters = without_buffers_, .products = nullptr, .observer = nullptr};
    if (level == Level::Op) parts.products = products_;
    if (!level) parts.observer = make_probe(inputs);
    return forward_to_recompute(host, inputs, std::move(run), options_, parts);
  }

 private:
  std::shared_ptr<LayerProbe> make_probe(const nn::TensorList& inputs) {
    auto probe = std::make_shared<LayerProbe>(products_, parameters_, inputs);
    plan_->measure(layer_, probe);
    return probe;
  }

  std::shared_ptr<BudgetPlan> plan_;
  size_t layer_;
  ActivationCheckpointOptions options_;
  std::shared_ptr<ProductChoice> products_;
  std::shared_ptr<const ParameterStorages> parameters_;
  std::shared_ptr<const ParameterStorages> without_buffers_;  // for recomputations, which write buffers again
};

}  // namespace

LayerHooks budget_hooks(const MemoryBudget& budget, size_t num_layers,
                        const ActivationCheckpointOptions& options) {
  return [plan = std::make_shared<BudgetPlan>(budget, num_layers), budget, options](size_t number,
                                                                                    const nn::AnyRef& layer) {
    return std::make_shared<BudgetHook>(plan, number, options,
                                        std::make_shared<ProductChoice>(layer, budget.op));
  };
}

class SavedBytes::Counter final : public SavedVariableHooks {
 public:
  explicit Counter(SavedBytes& counts) : counts_(counts) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    if (!counts_.parameters_.contains(tensor)) counts_.bytes_.add(tensor);
  }
  at::Tensor call_unpack_hook() override {
    TITAN_INTERNAL_ASSERT(false, "backward through a graph that only counts bytes");
  }

 private:
  SavedBytes& counts_;
};

std::unique_ptr<SavedVariableHooks> SavedBytes::make() { return std::make_unique<Counter>(*this); }

}  // namespace titan::activations
