#include "parallel/tensor/conversion.h"

#include <algorithm>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "ops/saved_outputs.h"
#include "titan/core/error.h"

namespace titan::tp {

using Kind = ActivationLayout::Kind;

namespace {

struct Moves {
  Kind from, to;
  Move forward, backward;
};

constexpr Moves kMoves[] = {
    {Kind::Shard, Kind::Replicate, Move::Gather, Move::ReduceScatter},
    {Kind::Shard, Kind::Invariant, Move::Gather, Move::Slice},
    {Kind::Invariant, Kind::Replicate, Move::None, Move::AllReduce},
    {Kind::Invariant, Kind::Shard, Move::Slice, Move::Gather},
    {Kind::Replicate, Kind::Shard, Move::Slice, Move::Unslice},
    {Kind::Partial, Kind::Invariant, Move::AllReduce, Move::None},
    {Kind::Partial, Kind::Shard, Move::ReduceScatter, Move::Gather},
    {Kind::Partial, Kind::Replicate, Move::AllReduce, Move::AllReduce},
};

int64_t received_bytes(Move move, const at::Tensor& in, const at::Tensor& out, int64_t parts) {
  const auto bytes = [](const at::Tensor& t) { return t.numel() * static_cast<int64_t>(t.element_size()); };
  switch (move) {
    case Move::Gather:
      return bytes(out) / parts * (parts - 1);
    case Move::ReduceScatter:
      return bytes(in) / parts * (parts - 1);
    case Move::AllReduce:
      return 2 * bytes(in) / parts * (parts - 1);
    default:
      return 0;
  }
}

int64_t wrapped(int64_t dim, const at::Tensor& tensor) { return dim < 0 ? dim + tensor.dim() : dim; }

}  // namespace

const char* collective_of(Move move) {
  switch (move) {
    case Move::Gather:
      return "all-gather";
    case Move::ReduceScatter:
      return "reduce-scatter";
    case Move::AllReduce:
      return "all-reduce";
    default:
      return "";
  }
}

struct ConversionBackward final : torch::autograd::Node {
  ConversionBackward(const Conversion& conversion, int64_t dim, int64_t whole)
      : conversion(conversion), dim(dim), whole(whole) {}
  Conversion conversion;
  int64_t dim, whole;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    TITAN_CHECK(!at::GradMode::is_enabled(), name(),
                " has no second derivative: call backward with create_graph = false");
    if (!grads[0].defined()) return {at::Tensor()};
    return {
        conversion.move(conversion.backward_, grads[0], dim, whole, {"tp::backward", conversion.module_})};
  }
  std::string name() const override { return "titan::tp conversion backward"; }
};

Conversion::Conversion(ActivationLayout from, ActivationLayout to, std::shared_ptr<const TpGroup> group,
                       const char* module, int64_t whole)
    : from_(from), to_(to), group_(std::move(group)), module_(module), whole_(whole) {
  if (from == to) return;
  for (const Moves& moves : kMoves) {
    if (moves.from != from.kind || moves.to != to.kind) continue;
    forward_ = moves.forward;
    backward_ = moves.backward;
    return;
  }
  throw ConfigError(
      str("module '", module, "': an activation can't go from ", from, " to ", to,
          "; possible: from Shard to Replicate or Invariant, from Invariant to Replicate or Shard, from "
          "Replicate to Shard, from Partial to Invariant, Replicate or Shard"));
}

std::string Conversion::layouts() const { return from_ == to_ ? str(from_) : str(from_, " -> ", to_); }

std::string Conversion::collectives() const {
  const std::string forward = collective_of(forward_), backward = collective_of(backward_);
  if (forward.empty() && backward.empty()) return "";
  return str(forward.empty() ? "-" : forward, " / ", backward.empty() ? "-" : backward);
}

// A later gather of the parts can't know that they weren't equal.
void Conversion::check_even(const at::Tensor& tensor, int64_t dim) const {
  TITAN_CHECK(whole_ >= 0 || tensor.size(dim) % group_->count() == 0, "tensor parallel: dimension ", dim,
              " of ", tensor.sizes(), " at module '", module_, "' can't be cut into ", group_->count(),
              " equal parts");
}

at::Tensor Conversion::move(Move move, const at::Tensor& tensor, int64_t dim, int64_t whole,
                            dist::Label label) const {
  at::Tensor result;
  switch (move) {
    case Move::None:
      return tensor;
    case Move::Gather:
      result = group_->gather(tensor, dim, whole, label);
      break;
    case Move::ReduceScatter:
      result = group_->reduce_scatter(tensor, dim, label);
      break;
    case Move::AllReduce:
      result = group_->all_reduce(tensor, label);
      break;
    case Move::Slice:
      result = group_->slice(tensor, dim);
      break;
    case Move::Unslice:
      result = group_->unslice(tensor, dim, whole);
      break;
  }
  traffic_->calls += 1;
  traffic_->bytes += received_bytes(move, tensor, result, group_->count());
  return result;
}

at::Tensor Conversion::operator()(const at::Tensor& tensor) const {
  if (does_nothing()) return tensor;
  const ActivationLayout& sharded = from_.kind == Kind::Shard ? from_ : to_;
  const int64_t dim = sharded.kind == Kind::Shard ? wrapped(sharded.dim, tensor) : 0;
  TITAN_CHECK(dim >= 0 && dim < std::max<int64_t>(tensor.dim(), 1), "tensor parallel: ", sharded, " of ",
              tensor.sizes(), " at module '", module_, "'");
  if (to_.kind == Kind::Shard) check_even(tensor, dim);
  at::Tensor result;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto moved = [&] { return move(forward_, tensor, dim, whole_, {"tp::forward", module_}); };
    result = forward_ == Move::ReduceScatter ? ops::kept(ops::KeptKind::ReduceScatter, {}, moved) : moved();
    if (result.is_same(tensor)) result = tensor.alias();
  }
  if (!torch::autograd::compute_requires_grad(tensor)) return result;
  const int64_t whole = to_.kind == Kind::Shard ? tensor.size(dim) : whole_;
  auto node = std::shared_ptr<ConversionBackward>(new ConversionBackward(*this, dim, whole),
                                                  torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(tensor));
  torch::autograd::set_history(result, node);
  return result;
}

void ConversionHook::convert(nn::HookHost& host, const nn::TensorRefs& tensors, const char* what) const {
  size_t number = 0, converted = 0;
  for (at::Tensor* tensor : tensors) {
    if (!tensor->is_floating_point() || tensor->dim() == 0) continue;
    if (std::find(tensors_.begin(), tensors_.end(), number++) == tensors_.end()) continue;
    *tensor = conversion_(*tensor);
    ++converted;
  }
  // A loss and integers have nothing to convert; numbers beyond what the call has are a mistake in the plan.
  TITAN_CHECK(number == 0 || converted == tensors_.size(),
              "tensor parallel: the plan converts floating-point ", what, " number ", tensors_.back(),
              " of module '", host.fqn(), "', whose call has ", number);
}

void sum_gradient(nn::HookHost& host, const at::Tensor& param, std::shared_ptr<const TpGroup> group,
                  const char* module) {
  const std::weak_ptr<torch::nn::Module> owner = host.as_module().weak_from_this();
  const auto sum = [owner, group = std::move(group), module](const at::Tensor& gradient) {
    TITAN_CHECK(
        !at::GradMode::is_enabled(), "the gradient of module '", module,
        "' over tensor-parallel ranks has no second derivative: call backward with create_graph = false");
    const auto alive = owner.lock();
    const auto* host = dynamic_cast<const nn::HookHost*>(alive.get());
    if (host && host->param_owner) return gradient;
    return group->all_reduce(gradient, {"tp::gradient", module});
  };
  // A frozen one may thaw later.
  const bool trainable = param.requires_grad();
  at::Tensor(param).set_requires_grad(true);
  param.register_hook(sum);
  at::Tensor(param).set_requires_grad(trainable);
}

}  // namespace titan::tp
