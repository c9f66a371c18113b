// [Note: an optimizer's parts]
// A rule (OptimizerSpec) defines how a list of tensors is updated. A group has a learning rate and a copy of
// the rule's settings, for the parameters that one entry of param_groups matches. A batch has the parameters
// of one group, device and dtype, and their state; the rule updates it in one call.

#include "titan/optim/optimizer.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <regex>
#include <string_view>
#include <tuple>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "tensor/memory.h"
#include "titan/core/error.h"

namespace titan::optim {

void describe(config::Table<OptimizerSettings>& table) {
  using Settings = OptimizerSettings;
  table.field("name", &Settings::name,
              "Adam adds the weight decay to the gradient, AdamW to the update; or one that was registered "
              "(docs/extending.md)");
  table.field("lr", &Settings::lr, "peak learning rate", config::finite_at_least(0));
  table.field("beta1", &Settings::beta1, "decay of the gradient's average", config::in_range_below(0, 1));
  table.field("beta2", &Settings::beta2, "decay of the squared gradient's average",
              config::in_range_below(0, 1));
  table.field("eps", &Settings::eps, "added to the denominator", config::finite_at_least(0));
  table.field("weight_decay", &Settings::weight_decay, "of every parameter whose group sets no other",
              config::finite_at_least(0));
  table.field("implementation", &Settings::implementation,
              "fused is one pass over memory, foreach one call per operation, for-loop the plain formula",
              config::one_of({"for-loop", "foreach", "fused"}));
  table.field("state_dtype", &Settings::state_dtype,
              "dtype of the gradient's two averages, which are updated in fp32; unset: training.dtype",
              config::one_of({"float32", "bfloat16"}));
  table.field(
      "stochastic_rounding", &Settings::stochastic_rounding,
      "round states and parameters that are kept in bfloat16 up or down at random, so that their mean "
      "is exact and small updates aren't lost; else to nearest");
  table.field("param_groups", &Settings::param_groups,
              "settings for parameters by name: \"regex: key=value, ...\" with keys lr, beta1, beta2, eps, "
              "weight_decay; the first match counts, and every regex must match a parameter");
  table.refused("early_step_in_backward", false,
                "an optimizer inside the backward makes clipping meaningless");
}

namespace {

// ---- groups

struct Group {
  double lr = 0;
  std::shared_ptr<void> args;
};

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

double parse_number(std::string_view key, std::string_view text, const config::Constraint& constraint) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool read = error == std::errc{} && end == text.data() + text.size() && std::isfinite(number);
  if (!read || (constraint.accepts && !constraint.accepts(number)))
    throw ConfigError(titan::str(key, " must be ", constraint.allowed.empty() ? "finite" : constraint.allowed,
                                 ", got '", text, "'"));
  return number;
}

// Reads "key=value" into `group`. If a rule reads [optimizer], lr is also one of its fields.
void apply_assignment(std::string_view text, const OptimizerSpec& spec, Group& group) {
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos) throw ConfigError(titan::str("expected key=value, got '", text, "'"));
  const std::string_view key = trimmed(text.substr(0, equals)), value = trimmed(text.substr(equals + 1));
  if (key == "lr") {
    group.lr = parse_number(key, value, config::finite_at_least(0));
    return;
  }
  std::string known = "lr";
  for (const config::FieldInfo& field : spec.args.fields()) {
    if (field.kind != config::Kind::Float || field.key == "lr") continue;
    if (field.key == key) return field.set(group.args.get(), parse_number(key, value, field.constraint));
    known += " " + field.key;
  }
  throw ConfigError(titan::str("unknown key '", key, "'; known: ", known));
}

struct GroupRule {
  std::regex pattern;
  Group group;
};

// Parses "regex: key=value, key=value". The regex may contain colons: the values follow the last ": ".
GroupRule parse_rule(const std::string& text, const OptimizerSpec& spec, Group group) {
  const size_t colon = text.rfind(": ");
  if (colon == std::string::npos) throw ConfigError("expected \"regex: key=value, ...\"");
  const std::string_view values = std::string_view(text).substr(colon + 2);
  for (size_t start = 0; start <= values.size();) {
    const size_t comma = std::min(values.find(',', start), values.size());
    apply_assignment(trimmed(values.substr(start, comma - start)), spec, group);
    start = comma + 1;
  }
  try {
    return {std::regex(text.substr(0, colon)), std::move(group)};
  } catch (const std::regex_error& error) {
    throw ConfigError(titan::str("not a regular expression: ", error.what()));
  }
}

// Group 0 holds the defaults, group i the i-th entry of settings.param_groups.
struct GroupAssignment {
  std::vector<Group> groups;
  std::vector<size_t> group_of;  ///< one for each parameter
};

GroupAssignment assign_groups(const OptimizerSpec& spec, const OptimizerSettings& settings,
                              const std::vector<Parameter>& parameters,
                              const std::vector<std::string>& elsewhere) {
  const auto defaults = [&] { return Group{settings.lr, spec.args.make(settings)}; };
  GroupAssignment result{{defaults()}, std::vector<size_t>(parameters.size(), 0)};
  std::vector<std::string> problems;
  for (const std::string& text : settings.param_groups) {
    const std::string where = titan::str("optimizer.param_groups: \"", text, "\": ");
    try {
      GroupRule rule = parse_rule(text, spec, defaults());
      const auto matches = [&](const std::string& name) { return std::regex_search(name, rule.pattern); };
      bool matched = std::any_of(elsewhere.begin(), elsewhere.end(), matches);
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (!matches(parameters[i].name)) continue;
        matched = true;
        if (result.group_of[i] == 0) result.group_of[i] = result.groups.size();
      }
      if (!matched) problems.push_back(where + "matches no parameter");
      result.groups.push_back(std::move(rule.group));
    } catch (const ConfigError& error) {
      problems.push_back(where + error.what());
    }
  }
  if (!problems.empty()) throw ConfigError(std::move(problems));
  return result;
}

// ---- batches

struct Batch {
  Group group;
  std::vector<Parameter> parameters;
  std::vector<std::vector<at::Tensor>> state;  // by name, then parameter; empty before the first use
  at::Tensor step_counts;                      // [parameters]
  at::Tensor lr_on_device;                     // fp32 scalar; undefined before the first write

  const at::Tensor& local(size_t i) const { return parameters[i].data.local; }
};

// Fused kernels iterate over memory, so a gradient must have the same layout as its parameter.
at::Tensor laid_out_as(const at::Tensor& param, const at::Tensor& grad) {
  if (grad.strides() == param.strides()) return grad;
  return at::empty_like(param).copy_(grad);
}

// Whether a rule that multiplies Update::grads multiplies the parameters' own gradients.
bool are_laid_out(const Batch& batch) {
  for (size_t i = 0; i < batch.parameters.size(); ++i) {
    const at::Tensor& grad = batch.local(i).grad();
    if (grad.defined() && grad.strides() != batch.local(i).strides()) return false;
  }
  return true;
}

void multiply_gradients(const Batch& batch, const at::Tensor& factor) {
  std::vector<at::Tensor> grads;
  for (size_t i = 0; i < batch.parameters.size(); ++i)
    if (batch.local(i).grad().defined()) grads.push_back(batch.local(i).grad());
  if (grads.empty()) return;
  // A factor in the gradients' dtype needs one launch for many tensors, but it must not be rounded to 16 bits, as GPUs round a scalar tensor. A
  // vector makes them compute in its dtype.
  const bool is_narrow = c10::elementSize(grads[0].scalar_type()) < 4 && !grads[0].is_cpu();
  if (!is_narrow)
    return at::_foreach_mul_(grads, grads[0].scalar_type() == at::kFloat ? factor.to(at::kFloat) : factor);
  for (at::Tensor& grad : grads)
    if (grad.dim() > 0) {
      grad.mul_(factor.view({1}));
    } else {
      grad.view({1}).mul_(factor.view({1}));
    }
}

at::Tensor zero_state(const at::Tensor& param, at::ScalarType dtype) {
  const at::TensorOptions options = param.options().dtype(dtype);
  return param.is_contiguous() ? resident_zeros(param.sizes(), options) : at::zeros_like(param, options);
}

std::vector<Parameter> trainable(const std::vector<Parameter>& parameters) {
  std::vector<Parameter> result;
  for (const Parameter& parameter : parameters) {
    if (!parameter.data.local.requires_grad()) continue;
    TITAN_CHECK(parameter.data.local.is_leaf(), "parameter '", parameter.name,
                "' is computed from another tensor, so its gradient never arrives; pass "
                "titan::parameters(model), whose shards are leaves, to the optimizer");
    TITAN_CHECK(!is_deferred(parameter.data.local), "parameter '", parameter.name,
                "' has no memory yet: materialize() the model before making its optimizer");
    result.push_back(parameter);
  }
  return result;
}

// One batch for each group, device and dtype, because the kernels don't accept mixed lists.
std::vector<Batch> make_batches(const std::vector<Parameter>& parameters, const GroupAssignment& assignment) {
  std::map<std::tuple<size_t, c10::DeviceType, int, at::ScalarType>, Batch> by_kind;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& local = parameters[i].data.local;
    const size_t group = assignment.group_of[i];
    Batch& batch = by_kind[{group, local.device().type(), local.device().index(), local.scalar_type()}];
    batch.group = assignment.groups[group];
    batch.parameters.push_back(parameters[i]);
  }
  std::vector<Batch> batches;
  for (auto& [kind, batch] : by_kind) batches.push_back(std::move(batch));
  return batches;
}

DTensor replicated_scalar(const DeviceMesh& mesh, const at::Tensor& value) {
  return {value, mesh, std::vector<Placement>(mesh.num_axes(), Placement::replicate()), {}, {}};
}

}  // namespace

struct Optimizer::Impl {
  OptimizerSpec spec;
  bool runs_on_device = false;
  double default_lr = 0;
  double lr_factor = 1;
  std::vector<Batch> batches;

  // Called at the first use, because zeroing twice the model's size would delay start-up.
  void allocate_state(Batch& batch) const {
    if (batch.step_counts.defined()) return;
    const auto count = static_cast<int64_t>(batch.parameters.size());
    const at::Device device = runs_on_device ? batch.local(0).device() : at::Device(at::kCPU);
    batch.step_counts = at::zeros({count}, at::dtype(at::kFloat).device(device));
    batch.state.resize(spec.state.size());
    const at::ScalarType dtype = spec.state_dtype(batch.group.args.get(), batch.local(0).scalar_type());
    for (const Parameter& parameter : batch.parameters)
      for (auto& tensors : batch.state) tensors.push_back(zero_state(parameter.data.local, dtype));
  }

  // An update of the parameters that have a gradient now.
  Update update_of(const Batch& batch) const {
    Update update;
    update.lr = lr_of(batch);
    update.state.resize(batch.state.size());
    for (size_t i = 0; i < batch.parameters.size(); ++i) {
      const at::Tensor& param = batch.local(i);
      if (!param.grad().defined()) continue;
      update.params.push_back(param);
      update.parameters.push_back(&batch.parameters[i]);
      update.grads.push_back(laid_out_as(param, param.grad()));
      for (size_t k = 0; k < batch.state.size(); ++k) update.state[k].push_back(batch.state[k][i]);
      update.steps.push_back(batch.step_counts[static_cast<int64_t>(i)]);
    }
    return update;
  }

  double lr_of(const Batch& batch) const { return batch.group.lr * lr_factor; }

  bool can_be_recorded() const {
    return runs_on_device && std::ranges::all_of(batches, [&](const Batch& batch) {
             return spec.takes_lr_on_device(batch.group.args.get(), batch.local(0));
           });
  }

  void write_lrs() {
    const at::NoGradGuard no_grad;
    for (Batch& batch : batches) {
      if (!batch.lr_on_device.defined())
        batch.lr_on_device = at::empty({}, at::dtype(at::kFloat).device(batch.local(0).device()));
      batch.lr_on_device.fill_(lr_of(batch));
    }
  }

  void step(const at::Tensor& skip, const at::Tensor& grad_factor, bool records = false) {
    const at::NoGradGuard no_grad;
    for (Batch& batch : batches) step(batch, skip, grad_factor, records);
  }

  void step(Batch& batch, const at::Tensor& skip, const at::Tensor& grad_factor, bool records) const {
    allocate_state(batch);
    const void* args = batch.group.args.get();
    const bool rule_multiplies =
        grad_factor.defined() && are_laid_out(batch) && spec.takes_grad_factor(args, batch.local(0));
    if (grad_factor.defined() && !rule_multiplies) multiply_gradients(batch, grad_factor);
    Update update = update_of(batch);
    if (update.params.empty()) return;
    const at::Tensor counted =
        skip.defined() ? skip.neg().add_(1) : at::ones({}, batch.step_counts.options());
    if (update.params.size() == batch.parameters.size()) {
      batch.step_counts.add_(counted);
    } else {
      for (at::Tensor& count : update.steps) count.add_(counted);
    }
    update.skip = skip;
    if (rule_multiplies) update.grad_factor = grad_factor;
    if (records) update.lr_on_device = batch.lr_on_device;
    spec.step(args, update);
  }
};

Optimizer::Optimizer(const std::vector<Parameter>& parameters, const OptimizerSettings& settings,
                     const std::vector<std::string>& elsewhere)
    : impl_(new Impl{.spec = optimizers().get(settings.name), .default_lr = settings.lr, .batches = {}}) {
  const at::NoGradGuard no_grad;
  impl_->runs_on_device = impl_->spec.runs_on_device(impl_->spec.args.make(settings).get());
  const std::vector<Parameter> stepped = trainable(parameters);
  impl_->batches = make_batches(stepped, assign_groups(impl_->spec, settings, stepped, elsewhere));
}

Optimizer::~Optimizer() = default;
Optimizer::Optimizer(Optimizer&&) noexcept = default;
Optimizer& Optimizer::operator=(Optimizer&&) noexcept = default;

void Optimizer::step() { impl_->step({}, {}); }

void Optimizer::step_unless(const at::Tensor& skip, const at::Tensor& grad_factor) {
  TITAN_CHECK(can_skip_on_device(),
              "this optimizer can't skip a step on the device; Adam and AdamW can with "
              "optimizer.implementation = 'fused'");
  impl_->step(skip, grad_factor);
}

bool Optimizer::can_skip_on_device() const { return impl_->runs_on_device; }

bool Optimizer::can_be_recorded() const { return impl_->can_be_recorded(); }

void Optimizer::record_step_unless(const at::Tensor& skip, const at::Tensor& grad_factor) {
  TITAN_CHECK(
      can_be_recorded(),
      "this optimizer's step can't be recorded, because its rule takes the learning rate from the host "
      "(OptimizerRule::takes_lr_on_device)");
  impl_->step(skip, grad_factor, /*records=*/true);
}

void Optimizer::write_lrs() { impl_->write_lrs(); }

void Optimizer::zero_grad(bool set_to_none) {
  const at::NoGradGuard no_grad;
  for (const Batch& batch : impl_->batches)
    for (const Parameter& parameter : batch.parameters) {
      at::Tensor param = parameter.data.local;
      if (!param.grad().defined()) continue;
      if (set_to_none) {
        param.mutable_grad().reset();
      } else {
        param.mutable_grad().zero_();
      }
    }
}

void Optimizer::set_lr_factor(double factor) { impl_->lr_factor = factor; }

double Optimizer::lr() const { return impl_->default_lr * impl_->lr_factor; }

std::multimap<std::string, Optimizer::ParameterState> Optimizer::state() {
  const at::NoGradGuard no_grad;
  std::multimap<std::string, ParameterState> result;
  for (Batch& batch : impl_->batches) {
    impl_->allocate_state(batch);
    for (size_t i = 0; i < batch.parameters.size(); ++i) {
      const DTensor& data = batch.parameters[i].data;
      ParameterState& state = result.emplace(batch.parameters[i].name, ParameterState{})->second;
      for (size_t k = 0; k < batch.state.size(); ++k) {
        DTensor& kept = state.emplace(impl_->spec.state[k], data).first->second;
        kept.local = batch.state[k][i];
      }
      state.emplace("step", replicated_scalar(data.mesh, batch.step_counts[static_cast<int64_t>(i)]));
    }
  }
  return result;
}

std::vector<at::Tensor> Optimizer::allocated_state() const {
  std::vector<at::Tensor> tensors;
  for (const Batch& batch : impl_->batches)
    for (const auto& of_name : batch.state) tensors.insert(tensors.end(), of_name.begin(), of_name.end());
  return tensors;
}

}  // namespace titan::optim
