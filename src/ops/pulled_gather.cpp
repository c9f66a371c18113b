#include "ops/pulled_gather.h"

#include <ATen/ops/empty.h>

#include "ops/joint_node.h"

namespace titan::ops {

namespace {

// Not every operation and not every backend knows 8-bit floating-point numbers.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.element_size() == 1 ? tensor.view(at::kByte) : tensor;
}

// Of rows [B * S, F].
at::Tensor rows_of_part(const at::Tensor& rows, int64_t batch, int rank, int count) {
  if (!rows.defined()) return {};
  const at::Tensor whole = as_bytes(rows.contiguous()).view({batch, rows.size(0) / batch, rows.size(1)});
  return as_rows(part_of_sequence(whole, rank, count)).view(rows.scalar_type());
}

}  // namespace

at::Tensor part_of_sequence(const at::Tensor& whole, int rank, int count) {
  const int64_t length = whole.size(1) / count;
  return whole.narrow(1, rank * length, length);
}

Operand part_of_sequence(const Operand& whole, int64_t batch, int rank, int count) {
  Operand part;
  part.dtype = whole.dtype;
  part.values = rows_of_part(whole.values, batch, rank, count);
  if (!whole.along_rows.defined()) return part;
  const at::Tensor& scale = whole.along_rows.scale;
  part.along_rows = {rows_of_part(whole.along_rows.data, batch, rank, count),
                     scale.dim() == 0 ? scale : rows_of_part(scale, batch, rank, count)};
  return part;
}

at::Tensor product(const Products& products, Pass pass, const Operand& rows, const Operand& weight) {
  return pass == Pass::Forward ? products.forward(rows, weight) : products.grad_input(rows, weight);
}

PulledGather::PulledGather(const SequenceExchange& exchange, const Operand& rows, const at::Tensor& part)
    : count_(exchange.count()), sizes_(part.sizes().vec()), dtype_(rows.dtype), travels_as_(rows.dtype) {
  at::Tensor travelling = rows.values;
  if (rows.along_rows.defined()) {
    scale_ = rows.along_rows.scale;
    travels_as_ = rows.along_rows.data.scalar_type();
    travelling = as_bytes(rows.along_rows.data);
  }
  travelling = travelling.contiguous().view(sizes_);
  sizes_[1] *= count_;
  if (exchange.at_once()) {
    whole_ = operand_of(exchange.gather_whole(travelling));
    return;
  }
  gather_ = exchange.gather(travelling);
  arrived_ = at::empty(sizes_, travelling.options());
}

Operand PulledGather::operand_of(const at::Tensor& travelled) const {
  const at::Tensor rows = as_rows(travelled);
  if (!scale_.defined()) return rows;
  Operand operand;
  operand.dtype = dtype_;
  operand.along_rows = {rows.view(travels_as_), scale_};
  return operand;
}

template <class Use>
void PulledGather::take_parts(const Use& use) {
  for (int rank = gather_->next(); rank >= 0; rank = gather_->next()) {
    const at::Tensor part = gather_->part(rank);
    use(rank, part);
    part_of_sequence(arrived_, rank, count_).copy_(part);
  }
  gather_.reset();
  whole_ = operand_of(arrived_);
  arrived_ = at::Tensor();
}

at::Tensor PulledGather::multiply_parts(const Products& products, Pass pass, const Operand& weight,
                                        int64_t features) {
  std::vector<int64_t> sizes = sizes_;
  sizes.back() = features;
  const auto device = (scale_.defined() ? scale_ : arrived_).options();
  at::Tensor result = at::empty(sizes, device.dtype(dtype_));
  const Operand prepared = products.weight(weight, pass);
  take_parts([&](int rank, const at::Tensor& part) {
    const at::Tensor place = part_of_sequence(result, rank, count_);
    place.copy_(product(products, pass, operand_of(part), prepared).view(place.sizes()));
  });
  return result;
}

const Operand& PulledGather::whole() {
  if (gather_) take_parts([](int, const at::Tensor&) {});
  return whole_;
}

}  // namespace titan::ops
