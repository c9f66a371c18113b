#include "parallel/tensor/tp_group.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

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

}  // namespace

TpGroup::TpGroup(const DeviceMesh& axis) : group_(axis.group()) {}

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

}  // namespace titan::tp
