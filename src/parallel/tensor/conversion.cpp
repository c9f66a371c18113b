#include "parallel/tensor/conversion.h"

#include <algorithm>

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "ops/autograd_node.h"
#include "titan/core/error.h"
#include "titan/tensor/placement.h"

namespace titan::tp {

namespace {

int64_t outer_numel(const at::Tensor& tensor, int64_t dim) {
  int64_t numel = 1;
  for (int64_t i = 0; i < dim; ++i) numel *= tensor.size(i);
  return numel;
}

std::vector<int64_t> with_size(const at::Tensor& tensor, int64_t dim, int64_t size) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[static_cast<size_t>(dim)] = size;
  return sizes;
}

at::Tensor padded(const at::Tensor& tensor, int64_t dim, int64_t size) {
  if (tensor.size(dim) == size) return tensor;
  std::vector<int64_t> padding(static_cast<size_t>(2 * (tensor.dim() - dim)), 0);
  padding.back() = size - tensor.size(dim);
  return at::constant_pad_nd(tensor, padding);
}

// The most rows of a batch that travel as tensors of one call: each is a call of its own to NCCL. Not measured.
constexpr int64_t kMostRows = 64;

std::vector<at::Tensor> rows_of(const at::Tensor& tensor, int64_t num_rows) {
  return tensor.view({num_rows, -1}).unbind();
}

}  // namespace

bool TpGroup::takes_rows(int64_t num_rows, const at::Tensor& tensor) const {
  return num_rows <= kMostRows && group_->has_batches(tensor.device());
}

at::Tensor TpGroup::gather(const at::Tensor& part, int64_t dim, int64_t whole, dist::Label label) const {
  const int64_t parts = count();
  const int64_t length = whole < 0 ? part.size(dim) : padded_chunk_length(whole, parts);
  const at::Tensor mine = padded(part, dim, length).contiguous();
  const int64_t outer = outer_numel(mine, dim);
  at::Tensor out = at::empty(with_size(mine, dim, length * parts), mine.options());
  if (mine.numel() == 0) {
    // nothing to move
  } else if (outer == 1) {
    group_->all_gather(out.view(-1), mine.view(-1), label).wait();
  } else if (takes_rows(outer, mine)) {
    group_->all_gather(rows_of(out, outer), rows_of(mine, outer), label).wait();
  } else {
    const int64_t run = mine.numel() / outer;
    const at::Tensor by_rank = by_rank_.get({parts, outer, run}, mine.options());
    group_->all_gather(by_rank.view(-1), mine.view(-1), label).wait();
    out.view({outer, parts, run}).copy_(by_rank.transpose(0, 1));
  }
  return whole < 0 || whole == length * parts ? out : out.narrow(dim, 0, whole).contiguous();
}

at::Tensor TpGroup::reduce_scatter(const at::Tensor& summand, int64_t dim, dist::Label label) const {
  const int64_t parts = count(), whole = summand.size(dim), length = padded_chunk_length(whole, parts);
  const at::Tensor all = padded(summand, dim, length * parts).contiguous();
  at::Tensor out = at::empty(with_size(all, dim, length), all.options());
  const int64_t outer = outer_numel(all, dim);
  if (all.numel() == 0) {
    // nothing to move
  } else if (outer == 1) {
    group_->reduce_scatter(out.view(-1), all.view(-1), label).wait();
  } else if (takes_rows(outer, all)) {
    group_->reduce_scatter(rows_of(out, outer), rows_of(all, outer), label).wait();
  } else {
    const int64_t run = out.numel() / outer;
    const at::Tensor by_rank = by_rank_.get({parts, outer, run}, all.options());
    by_rank.copy_(all.view({outer, parts, run}).transpose(0, 1));
    group_->reduce_scatter(out.view(-1), by_rank.view(-1), label).wait();
  }
  const int64_t mine = chunk_of(whole, parts, index()).length;
  return mine == length ? out : out.narrow(dim, 0, mine).contiguous();
}

at::Tensor TpGroup::all_reduce(const at::Tensor& summand, dist::Label label) const {
  at::Tensor sum = summand.clone(at::MemoryFormat::Contiguous);
  if (sum.numel() > 0) group_->all_reduce(sum, dist::ReduceOp::Sum, label).wait();
  return sum;
}

at::Tensor TpGroup::slice(const at::Tensor& whole, int64_t dim) const {
  const Chunk mine = chunk_of(whole.size(dim), count(), index());
  return whole.narrow(dim, mine.offset, mine.length).contiguous();
}

at::Tensor TpGroup::unslice(const at::Tensor& part, int64_t dim, int64_t whole) const {
  const Chunk mine = chunk_of(whole, count(), index());
  at::Tensor result = at::zeros(with_size(part, dim, whole), part.options());
  result.narrow(dim, mine.offset, mine.length).copy_(part);
  return result;
}

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

// Returns "" for moves without communication.
const char* collective_of(Move move) {
  constexpr const char* kNames[] = {"", "all-gather", "reduce-scatter", "all-reduce", "", ""};
  return kNames[static_cast<size_t>(move)];
}

int64_t received_bytes(Move move, const at::Tensor& in, const at::Tensor& out, int64_t parts) {
  const auto bytes = [](const at::Tensor& t) { return static_cast<int64_t>(t.nbytes()); };
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

struct ConversionBackward final : torch::autograd::Node {
  ConversionBackward(const Conversion& conversion, int64_t dim, int64_t whole)
      : conversion(conversion), dim(dim), whole(whole) {}
  Conversion conversion;
  int64_t dim, whole;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    ops::refuse_second_derivative(*this);
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
  // A later gather of the parts would take them for equal ones.
  TITAN_CHECK(to_.kind != Kind::Shard || whole_ >= 0 || tensor.size(dim) % group_->count() == 0,
              "tensor parallel: dimension ", dim, " of ", tensor.sizes(), " at module '", module_,
              "' can't be cut into ", group_->count(), " equal parts");
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
  // Losses and integers aren't converted. A number beyond the call's tensors is an error in the plan.
  TITAN_CHECK(number == 0 || converted == tensors_.size(),
              "tensor parallel: the plan converts floating-point ", what, " number ", tensors_.back(),
              " of module '", host.fqn(), "', whose call has ", number);
}

}  // namespace titan::tp
