#include "titan/optim/optimizer.h"

#include <map>
#include <tuple>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "adam_step.h"
#include "param_groups.h"
#include "tensor/param_storage.h"
#include "tensor/resident_memory.h"
#include "titan/core/error.h"

namespace titan::optim {
namespace {

// Parameters that are stepped by one call, and their state.
struct Batch {
  AdamOptions options;
  std::vector<Parameter> parameters;
  AdamLists all;           // of every parameter, but for the gradients; state from its first use on
  at::Tensor step_counts;  // what all.steps are elements of

  // Those of `all` that have a gradient now.
  AdamLists with_gradients() const;
};

// The fused kernels walk over memory, so a gradient must lie there as its parameter does.
at::Tensor laid_out_as(const at::Tensor& param, const at::Tensor& grad) {
  if (grad.strides() == param.strides()) return grad;
  return at::empty_like(param).copy_(grad);
}

at::Tensor zero_state(const at::Tensor& param) {
  return param.is_contiguous() ? resident_zeros(param.sizes(), param.options()) : at::zeros_like(param);
}

AdamLists Batch::with_gradients() const {
  AdamLists lists;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& param = all.params[i];
    const at::Tensor& grad = param.grad();
    if (!grad.defined()) continue;
    lists.params.push_back(param);
    lists.grads.push_back(laid_out_as(param, grad));
    lists.exp_avgs.push_back(all.exp_avgs[i]);
    lists.exp_avg_sqs.push_back(all.exp_avg_sqs[i]);
    lists.steps.push_back(all.steps[i]);
  }
  return lists;
}

AdamStep implementation_named(const std::string& name) {
  if (name == "fused") return fused_adam_step;
  if (name == "foreach") return foreach_adam_step;
  TITAN_CHECK(name == "for-loop", "optimizer.implementation: unknown '", name,
              "'; known: for-loop foreach fused");
  return for_loop_adam_step;
}

WeightDecay decay_of(const std::string& name) {
  TITAN_CHECK(name == "Adam" || name == "AdamW", "optimizer.name: unknown '", name, "'; known: Adam AdamW");
  return name == "Adam" ? WeightDecay::InGradient : WeightDecay::Decoupled;
}

std::vector<Parameter> trainable(const std::vector<Parameter>& parameters) {
  std::vector<Parameter> result;
  for (const auto& parameter : parameters) {
    if (!parameter.data.local.requires_grad()) continue;
    TITAN_CHECK(parameter.data.local.is_leaf(), "parameter '", parameter.name,
                "' is computed from another tensor: its gradient never arrives (an optimizer takes "
                "titan::parameters(model), whose shards are leaves)");
    TITAN_CHECK(!is_deferred(parameter.data.local), "parameter '", parameter.name,
                "' has no memory yet: materialize() the model before making its optimizer");
    result.push_back(parameter);
  }
  return result;
}

DTensor laid_out_as(const DTensor& like, const at::Tensor& local) {
  DTensor result = like;
  result.local = local;
  return result;
}

DTensor replicated_scalar(const DeviceMesh& mesh, const at::Tensor& value) {
  return {value, mesh, std::vector<Placement>(mesh.num_axes(), Placement::replicate()), {}, {}};
}

}  // namespace

struct Optimizer::Impl {
  AdamStep adam_step;
  WeightDecay decay;
  bool steps_on_device;
  double default_lr;
  double lr_factor = 1;
  std::vector<Batch> batches;

  void make_batches(const std::vector<Parameter>& parameters, const GroupAssignment& assignment);
  void allocate_state(Batch& batch) const;
  void step(Batch& batch, const at::Tensor& skip) const;
};

// One batch for each group, device and dtype, as the kernels take no mixtures.
void Optimizer::Impl::make_batches(const std::vector<Parameter>& parameters,
                                   const GroupAssignment& assignment) {
  std::map<std::tuple<size_t, c10::DeviceType, int, at::ScalarType>, Batch> by_kind;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& local = parameters[i].data.local;
    size_t group = assignment.group_of[i];
    Batch& batch = by_kind[{group, local.device().type(), local.device().index(), local.scalar_type()}];
    batch.options = assignment.groups[group];
    batch.parameters.push_back(parameters[i]);
    batch.all.params.push_back(local);
  }
  for (auto& [kind, batch] : by_kind) {
    batches.push_back(std::move(batch));
  }
}

// At the first use, as zeroing twice the model's size would otherwise be a part of start-up.
void Optimizer::Impl::allocate_state(Batch& batch) const {
  if (batch.step_counts.defined()) return;
  const at::Device device = batch.parameters.front().data.local.device();
  auto count = static_cast<int64_t>(batch.parameters.size());
  batch.step_counts = at::zeros({count}, at::dtype(at::kFloat).device(steps_on_device ? device : at::kCPU));
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor& local = batch.parameters[i].data.local;
    batch.all.exp_avgs.push_back(zero_state(local));
    batch.all.exp_avg_sqs.push_back(zero_state(local));
    batch.all.steps.push_back(batch.step_counts[i]);
  }
}

void Optimizer::Impl::step(Batch& batch, const at::Tensor& skip) const {
  allocate_state(batch);
  AdamLists lists = batch.with_gradients();
  if (lists.params.empty()) return;
  const at::Tensor counted = skip.defined() ? skip.neg().add_(1) : at::ones({}, batch.step_counts.options());
  if (lists.params.size() == batch.parameters.size()) {
    batch.step_counts.add_(counted);
  } else {
    for (at::Tensor& step : lists.steps) step.add_(counted);
  }
  AdamOptions options = batch.options;
  options.lr *= lr_factor;
  skip.defined() ? fused_adam_step_unless(skip, lists, options, decay) : adam_step(lists, options, decay);
}

Optimizer::Optimizer(const std::vector<Parameter>& parameters, const OptimizerSettings& settings,
                     const std::vector<std::string>& elsewhere)
    : impl_(new Impl{.adam_step = implementation_named(settings.implementation),
                     .decay = decay_of(settings.name),
                     .steps_on_device = settings.implementation == "fused",
                     .default_lr = settings.lr,
                     .batches = {}}) {
  at::NoGradGuard no_grad;
  std::vector<Parameter> stepped = trainable(parameters);
  std::vector<std::string> names;
  for (const auto& parameter : stepped) names.push_back(parameter.name);
  impl_->make_batches(stepped, assign_groups(settings, names, elsewhere));
}

Optimizer::~Optimizer() = default;
Optimizer::Optimizer(Optimizer&&) noexcept = default;
Optimizer& Optimizer::operator=(Optimizer&&) noexcept = default;

void Optimizer::step() {
  at::NoGradGuard no_grad;
  for (auto& batch : impl_->batches) impl_->step(batch, {});
}

void Optimizer::step_unless(const at::Tensor& skip) {
  TITAN_CHECK(can_skip_on_device(), "only optimizer.implementation = 'fused' can skip a step on the device");
  at::NoGradGuard no_grad;
  for (auto& batch : impl_->batches) impl_->step(batch, skip);
}

bool Optimizer::can_skip_on_device() const { return impl_->adam_step == fused_adam_step; }

void Optimizer::zero_grad(bool set_to_none) {
  at::NoGradGuard no_grad;
  for (auto& batch : impl_->batches) {
    for (auto& param : batch.all.params) {
      if (!param.grad().defined()) continue;
      if (set_to_none) {
        param.mutable_grad().reset();
      } else {
        param.mutable_grad().zero_();
      }
    }
  }
}

void Optimizer::set_lr_factor(double factor) { impl_->lr_factor = factor; }

double Optimizer::lr() const { return impl_->default_lr * impl_->lr_factor; }

std::map<std::string, AdamState> Optimizer::state() {
  at::NoGradGuard no_grad;
  std::map<std::string, AdamState> result;
  for (auto& batch : impl_->batches) {
    impl_->allocate_state(batch);
    for (size_t i = 0; i < batch.parameters.size(); ++i) {
      const DTensor& data = batch.parameters[i].data;
      result.emplace(batch.parameters[i].name,
                     AdamState{.exp_avg = laid_out_as(data, batch.all.exp_avgs[i]),
                               .exp_avg_sq = laid_out_as(data, batch.all.exp_avg_sqs[i]),
                               .step = replicated_scalar(data.mesh, batch.all.steps[i])});
    }
  }
  return result;
}

}  // namespace titan::optim
