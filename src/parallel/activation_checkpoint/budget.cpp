#include "parallel/activation_checkpoint/budget.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/stream.h"

namespace titan::activations {

void StorageBytes::add(const at::Tensor& tensor) {
  if (!tensor.has_storage() || !seen_.insert(tensor.storage().unsafeGetStorageImpl()).second) return;
  alive_.push_back(tensor.storage().getWeakStorageImpl());
  total_ += static_cast<int64_t>(tensor.storage().nbytes());
}

bool StorageBytes::has(const at::Tensor& tensor) const {
  return tensor.has_storage() && seen_.contains(tensor.storage().unsafeGetStorageImpl());
}

LayerProbe::LayerProbe(std::shared_ptr<ProductChoice> products,
                       std::shared_ptr<const ParameterStorages> parameters, const nn::TensorList& inputs)
    : products_(std::move(products)), parameters_(std::move(parameters)), device_(compute_device(inputs)) {
  for (const at::Tensor& input : inputs) inputs_.add(input);
}

void LayerProbe::saved(const at::Tensor& tensor) {
  ++num_saved_;
  if (!parameters_->contains(tensor) && !inputs_.has(tensor)) saved_.add(tensor);
}

void LayerProbe::recomputing() {
  dist::Stream::current(device_).synchronize();
  start_ = std::chrono::steady_clock::now();
}

void LayerProbe::recomputed() { recompute_s_ = seconds_since_start(); }

double LayerProbe::seconds_since_start() const {
  dist::Stream::current(device_).synchronize();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

ops::SavedOutputs::Action LayerProbe::next(ops::KeptKind kind, const at::Tensor& weight) {
  if (kind == ops::KeptKind::Product && !products_->keeps(weight)) return Action::Compute;
  recomputing();
  return Action::Keep;
}

void LayerProbe::keep(const at::Tensor& output) {
  kept_.push_back({static_cast<double>(output.nbytes()), seconds_since_start(), num_saved_});
  start_ = std::chrono::steady_clock::now();
}

at::Tensor LayerProbe::hand_back() {
  TITAN_INTERNAL_ASSERT(false, "a layer that is being measured keeps no results");
}

std::optional<LayerCosts> LayerProbe::costs() const {
  if (!recompute_s_) return std::nullopt;
  LayerCosts costs;
  const auto inputs = static_cast<double>(inputs_.total());
  costs.full = costs.op = {inputs, *recompute_s_};
  costs.none.bytes = inputs + static_cast<double>(saved_.total());
  for (const Kept& kept : kept_) {
    if (kept.num_saved == num_saved_) continue;  // behind the last saved tensor: not kept, and not run again
    costs.op.bytes += kept.bytes;
    costs.op.recompute_s -= kept.seconds;
  }
  return costs;
}

std::optional<Level> BudgetPlan::level_of(size_t layer) {
  if (levels_.empty() && layer == 0) decide();
  if (levels_.empty()) return std::nullopt;
  return levels_[layer];
}

void BudgetPlan::measure(size_t layer, std::shared_ptr<LayerProbe> probe) {
  probes_[layer] = std::move(probe);
}

// On all ranks, as they go on to agree: a backward may have left a layer out on one of them.
bool BudgetPlan::all_measured() const {
  const bool here =
      std::all_of(probes_.begin(), probes_.end(), [](const auto& probe) { return probe && probe->costs(); });
  return budget_.group ? budget_.group->max(here ? 0.0 : 1.0, {"activations::budget"}) == 0 : here;
}

void BudgetPlan::decide() {
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

// The largest of each number over the ranks; from there on all compute the same.
void BudgetPlan::agree(std::vector<LayerCosts>& layers) const {
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

nn::TensorList BudgetHook::call(nn::HookHost& host, const nn::TensorList& inputs, Run run) {
  if (!at::GradMode::is_enabled()) return run(inputs);
  const std::optional<Level> level = plan_->level_of(layer_);
  if (!level) return measure(host, inputs, std::move(run));
  if (*level == Level::None) return run(inputs);
  const RecomputeFrame::Parts parts{*level == Level::Op ? products_ : nullptr, nullptr};
  return std::make_shared<RecomputeFrame>(host, inputs, std::move(run), options_, parts)->forward(inputs);
}

nn::TensorList BudgetHook::measure(nn::HookHost& host, const nn::TensorList& inputs, Run run) {
  if (!parameters_) parameters_ = std::make_shared<const ParameterStorages>(host.as_module());
  const auto probe = std::make_shared<LayerProbe>(products_, parameters_, inputs);
  plan_->measure(layer_, probe);
  const RecomputeFrame::Parts parts{nullptr, probe};
  return std::make_shared<RecomputeFrame>(host, inputs, std::move(run), options_, parts)->forward(inputs);
}

}  // namespace titan::activations
