// Turns a group's gradients into gradients of its shards: start_reduce issues the reduce-scatter.

#include "parallel/fsdp/gradient_collector.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "parallel/fsdp/comm_context.h"
#include "tensor/memory.h"
#include "titan/core/error.h"

namespace titan::fsdp {

at::Tensor host_zeros(int64_t numel, at::ScalarType dtype, at::Device device) {
  const auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
  return device.is_cuda() ? at::zeros({numel}, options.pinned_memory(true))
                          : resident_zeros({numel}, options);
}

at::Tensor host_empty(int64_t numel, at::ScalarType dtype, at::Device device) {
  const auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
  return device.is_cuda() ? at::empty({numel}, options.pinned_memory(true))
                          : resident_empty({numel}, options);
}

int64_t GradientCollector::kept_bytes() const {
  if (config_.reduce_every_micro_batch || !(config_.shard_group || config_.to_host)) return 0;
  return layout_.trainable_numel() * layout_.num_ranks() *
         static_cast<int64_t>(c10::elementSize(config_.reduce_dtype));
}

void GradientCollector::make_flat_grad() {
  if (flat_grad_.defined()) return;
  at::NoGradGuard no_grad;
  const int64_t numel = layout_.trainable_numel();
  const auto options = at::TensorOptions().dtype(config_.grad_dtype).device(config_.device);
  if (config_.to_host)
    flat_grad_ = host_zeros(numel, config_.grad_dtype, config_.device);
  else if (context_ && context_->pool.is_registered())  // sums are written there
    flat_grad_ = context_->pool.new_bytes(numel * static_cast<int64_t>(options.dtype().itemsize()))
                     .view(config_.grad_dtype)
                     .zero_();
  else
    flat_grad_ = resident_zeros({numel}, options);
  const size_t count = layout_.num_trainable();
  written_.assign(count, false);
  for (size_t i = 0; i < count; ++i)
    grad_parts_.push_back(part_of(flat_grad_, layout_.slots()[i].offset, shards_[i].sizes()));
}

bool GradientCollector::no_grad_yet() const {
  for (size_t i = 0; i < grad_parts_.size(); ++i)
    if (shards_[i].grad().defined()) return false;
  return true;
}

bool GradientCollector::all_grads_ours() const {
  for (size_t i = 0; i < grad_parts_.size(); ++i)
    if (!shards_[i].grad().is_same(grad_parts_[i])) return false;
  return true;
}

// Tensor parallelism may leave a rank's part of a vocabulary without rows, and its group without elements.
void GradientCollector::set_empty_grads() {
  for (size_t i = 0; i < layout_.num_trainable(); ++i)
    if (!shards_[i].grad().defined()) shards_[i].mutable_grad() = at::zeros_like(shards_[i]);
}

void GradientCollector::set_grads() {
  for (size_t i = 0; i < grad_parts_.size(); ++i) shards_[i].mutable_grad() = grad_parts_[i];
}

// If nothing is scattered and no cast is needed, the first micro-batch is collected in the flat gradient
// itself.
void GradientCollector::open_collected() {
  if (collected_.defined()) return;
  make_flat_grad();
  std::fill(written_.begin(), written_.end(), false);
  if (!config_.shard_group && flat_grad_serves()) {
    collected_ = flat_grad_;
    return;
  }
  TITAN_CHECK(context_, "backward through a sharded module whose model was destroyed");
  const int64_t numel = layout_.trainable_numel() * layout_.num_ranks();
  collected_ = context_->pool.acquire(numel, config_.reduce_dtype, dist::Stream::current(config_.device));
  zero_padding();
}

// The slot's chunks of all ranks. The parameter comes first, then the padding of the last chunks.
at::Tensor GradientCollector::place_by_parameter(size_t slot) const {
  const Slot& place = layout_.slots()[slot];
  return collected_.narrow(0, place.offset * layout_.num_ranks(), place.chunk_numel() * layout_.num_ranks());
}

// The padding is sent, too, so it must hold no NaN and no slow denormals.
void GradientCollector::zero_padding() {
  if (!layout_.has_padding()) return;
  if (by_parameter_) {
    for (size_t i = 0; i < written_.size(); ++i) {
      const at::Tensor place = place_by_parameter(i);
      const int64_t used = layout_.slots()[i].rows() * layout_.slots()[i].row_numel;
      if (used < place.numel()) place.narrow(0, used, place.numel() - used).zero_();
    }
    return;
  }
  const int64_t stride = layout_.trainable_numel();
  const auto zero = [&](int64_t first_row, int64_t rows, int64_t column, int64_t columns) {
    if (rows <= 0 || columns <= 0) return;
    collected_
        .as_strided({rows, columns}, {stride, 1}, collected_.storage_offset() + first_row * stride + column)
        .zero_();
  };
  const size_t count = written_.size();
  for (size_t i = 0; i < count; ++i) {
    const Slot& slot = layout_.slots()[i];
    const int64_t chunk_end = slot.offset + slot.chunk_numel();
    const int64_t next = i + 1 < count ? layout_.slots()[i + 1].offset : stride;
    zero(0, layout_.num_ranks(), chunk_end, next - chunk_end);  // alignment
    if (slot.chunk_rows == 0) continue;
    const int64_t whole_chunks = slot.rows() / slot.chunk_rows;
    const int64_t rest = slot.rows() * slot.row_numel - whole_chunks * slot.chunk_numel();
    zero(whole_chunks, 1, slot.offset + rest,
         whole_chunks < layout_.num_ranks() ? slot.chunk_numel() - rest : 0);
    zero(whole_chunks + 1, layout_.num_ranks() - whole_chunks - 1, slot.offset, slot.chunk_numel());
  }
}

// A packed tensor is [N, S_trainable]. Each of its N rows has one chunk of the parameter's rows; the last chunk may
// be short.
void GradientCollector::write(const at::Tensor& packed, size_t index, const at::Tensor& grad,
                              const at::Tensor& scale, bool first) const {
  const Slot& slot = layout_.slots()[index];
  const int64_t stride = layout_.trainable_numel(), chunk = slot.chunk_numel();
  const int64_t whole_chunks = slot.chunk_rows == 0 ? 0 : slot.rows() / slot.chunk_rows;
  const at::Tensor source = grad.contiguous();
  auto put_part = [&](at::Tensor target, const at::Tensor& part) {
    if (!scale.defined()) {
      first ? target.copy_(part) : target.add_(part);
    } else if (first) {
      at::mul_out(target, part, scale);  // before it is rounded to the target's type
    } else {
      target.addcmul_(part, scale);
    }
  };
  if (by_parameter_) return put_part(place_by_parameter(index).narrow(0, 0, grad.numel()), source.view(-1));
  auto put = [&](at::IntArrayRef sizes, int64_t to, int64_t from) {
    put_part(packed.as_strided(sizes, {stride, 1}, packed.storage_offset() + to),
             source.as_strided(sizes, {chunk, 1}, source.storage_offset() + from));
  };
  if (whole_chunks > 0) put({whole_chunks, chunk}, slot.offset, 0);
  const int64_t rest = slot.rows() * slot.row_numel - whole_chunks * chunk;
  if (rest > 0) put({1, rest}, whole_chunks * stride + slot.offset, whole_chunks * chunk);
}

bool GradientCollector::can_lend_place(size_t slot, at::ScalarType dtype) const {
  constexpr int few_ranks = 16;
  constexpr int64_t large_block = 1024;  // rows
  const bool in_blocks = !by_parameter_ && layout_.num_ranks() > few_ranks;
  if (in_blocks && layout_.slots()[slot].chunk_rows < large_block) return false;
  if (!lent_.empty()) return false;
  if (local()) return config_.grad_dtype == dtype && !shards_[slot].grad().defined();
  return config_.reduce_dtype == dtype && !(collected_.defined() && written_[slot]);
}

std::vector<at::Tensor> GradientCollector::lend(size_t slot, at::ScalarType dtype) {
  const Slot& place = layout_.slots()[slot];
  if (!context_ || place.rows() == 0) return {};
  at::NoGradGuard no_grad;
  if (!lent_.empty() && lent_[0].use_count() == 1) lent_.clear();  // the head has dropped it
  if (!can_lend_place(slot, dtype)) {
    const at::Tensor buffer =
        context_->pool.acquire(place.rows() * place.row_numel, dtype, dist::Stream::current(config_.device));
    return {buffer.view(place.shape)};
  }
  local() ? make_flat_grad() : open_collected();
  lent_slot_ = slot;
  if (by_parameter_) {
    const at::Tensor whole = place_by_parameter(slot).narrow(0, 0, place.rows() * place.row_numel);
    return lent_ = {whole.view(place.shape)};
  }
  const at::Tensor& packed = local() ? flat_grad_ : collected_;
  std::vector<int64_t> sizes = place.shape;
  int64_t offset = place.offset;
  for (int64_t row = 0; row < place.rows(); row += place.chunk_rows, offset += layout_.trainable_numel()) {
    sizes[0] = std::min(place.chunk_rows, place.rows() - row);
    lent_.push_back(part_of(packed, offset, sizes));
  }
  return lent_;
}

void GradientCollector::add_lent(size_t slot, const std::vector<at::Tensor>& blocks,
                                 const at::Tensor& scale) {
  at::NoGradGuard no_grad;
  if (!lent_.empty() && lent_[0].is_same(blocks[0])) {
    for (const at::Tensor& block : blocks) block.mul_(scale);
    lent_.clear();
    if (local()) {
      shards_[slot].mutable_grad() = grad_parts_[slot];
    } else {
      written_[slot] = true;
    }
    return;
  }
  add(slot, blocks.size() == 1 ? blocks[0] : at::cat(blocks), scale);
  if (!context_) return;
  const dist::Stream current = dist::Stream::current(config_.device);
  for (const at::Tensor& block : blocks) context_->pool.release(block, current);
}

// The blocks keep their identity, so the head isn't concerned. They move to buffers of the pool, because
// add_lent releases them there.
void GradientCollector::move_loan() {
  const auto copy = [&](const at::Tensor& block) {
    if (!context_) return block.clone();
    const dist::Stream current = dist::Stream::current(config_.device);
    return context_->pool.acquire(block.numel(), block.scalar_type(), current)
        .view(block.sizes())
        .copy_(block);
  };
  for (const at::Tensor& block : std::exchange(lent_, {}))
    if (block.use_count() > 1) block.set_data(copy(block));
}

// Whether the shard's gradient is in flat_grad_ already.
bool GradientCollector::has_own_grad(size_t slot) const {
  const at::Tensor& grad = shards_[slot].grad();
  const bool ours = grad.is_same(grad_parts_[slot]);
  TITAN_CHECK(
      ours || !grad.defined(),
      "the gradient of a sharded parameter was replaced by another tensor; zero it or set it to none");
  return ours;
}

bool GradientCollector::put(size_t slot, const ops::WeightGrad& grad) {
  if (!config_.device.is_cuda() || !(local() || by_parameter_)) return false;
  at::NoGradGuard no_grad;
  if (slot == lent_slot_) move_loan();
  const auto put_in = [&](const at::Tensor& place, bool adds) {
    return grad.products->put_grad_weight(place, grad.grad_output_NO, grad.input_NI, adds);
  };
  if (local()) {
    make_flat_grad();
    if (!put_in(grad_parts_[slot], has_own_grad(slot))) return false;
    shards_[slot].mutable_grad() = grad_parts_[slot];
    return true;
  }
  open_collected();
  const Slot& layout = layout_.slots()[slot];
  const at::Tensor whole = place_by_parameter(slot).narrow(0, 0, layout.rows() * layout.row_numel);
  if (!put_in(whole.view(layout.shape), written_[slot])) return false;
  written_[slot] = true;
  return true;
}

void GradientCollector::add(size_t slot, const at::Tensor& grad, const at::Tensor& scale) {
  at::NoGradGuard no_grad;
  if (slot == lent_slot_) move_loan();
  if (local()) {
    make_flat_grad();
    const bool ours = has_own_grad(slot);
    write(flat_grad_, slot, grad, scale, !ours);
    if (!ours) shards_[slot].mutable_grad() = grad_parts_[slot];
    return;
  }
  open_collected();
  write(collected_, slot, grad, scale, !written_[slot]);
  written_[slot] = true;
}

// A parameter that this backward didn't use contributes zeros, so that ranks may differ in what they use.
void GradientCollector::zero_missing() {
  for (size_t i = 0; i < written_.size(); ++i) {
    if (written_[i]) continue;
    written_[i] = true;
    if (by_parameter_) {
      place_by_parameter(i).zero_();
      continue;
    }
    const Slot& slot = layout_.slots()[i];
    collected_
        .as_strided({layout_.num_ranks(), slot.chunk_numel()}, {layout_.trainable_numel(), 1},
                    collected_.storage_offset() + slot.offset)
        .zero_();
  }
}

bool GradientCollector::start_reduce(bool last_micro_batch) {
  at::NoGradGuard no_grad;
  if (layout_.trainable_numel() == 0) {
    set_empty_grads();
    return false;
  }
  move_loan();
  if (local()) {
    make_flat_grad();
    for (size_t i = 0; i < grad_parts_.size(); ++i) {
      if (shards_[i].grad().defined()) continue;
      grad_parts_[i].zero_();
      shards_[i].mutable_grad() = grad_parts_[i];
    }
    return false;
  }
  // If the group ran twice in this forward, finish its first reduction.
  while (!advance_reduce()) {
  }
  const bool leaves =
      (config_.shard_group || config_.to_host) && (last_micro_batch || config_.reduce_every_micro_batch);
  owes_reduction_ = !last_micro_batch && (!leaves || config_.replicate_group);
  if (!last_micro_batch && !leaves) return false;  // the whole gradients stay collected
  open_collected();
  zero_missing();
  last_micro_batch_ = last_micro_batch;
  const dist::Stream current = dist::Stream::current(config_.device);
  context_->reduce_stream.wait(current);
  dist::StreamGuard on_reduce_stream(context_->reduce_stream);
  if (!config_.shard_group) {
    reduced_ = std::exchange(collected_, {});
    after_scatter();
    return true;
  }
  reduced_ =
      !config_.replicate_group && flat_grad_serves()
          ? flat_grad_
          : context_->pool.acquire(layout_.trainable_numel(), config_.reduce_dtype, context_->reduce_stream);
  start_scatter();
  phase_ = Phase::Scattering;
  return true;
}

void GradientCollector::start_scatter() {
  const dist::Label label{"fsdp::reduce_scatter", module_};
  if (!by_parameter_) {
    scattering_ = std::exchange(collected_, {});
    work_ = config_.shard_group->reduce_scatter(reduced_, scattering_, label);
    return;
  }
  std::vector<at::Tensor> to, from;
  for (size_t i = 0; i < layout_.num_trainable(); ++i) {
    const Slot& slot = layout_.slots()[i];
    if (slot.chunk_numel() == 0) continue;
    to.push_back(reduced_.narrow(0, slot.offset, slot.chunk_numel()));
    from.push_back(place_by_parameter(i));
    // No call writes what is between the slots, which later sums read.
    const int64_t end = slot.offset + slot.chunk_numel();
    const int64_t next =
        i + 1 < layout_.num_trainable() ? layout_.slots()[i + 1].offset : layout_.trainable_numel();
    if (end < next) reduced_.narrow(0, end, next - end).zero_();
  }
  work_ = config_.shard_group->reduce_scatter(to, from, label);
  scattering_ = std::exchange(collected_, {});
}

void GradientCollector::release(at::Tensor& buffer) {
  if (buffer.defined() && !buffer.is_same(flat_grad_))
    context_->pool.release(buffer, context_->reduce_stream);
  buffer.reset();
}

void GradientCollector::discard() {
  owes_reduction_ = false;
  move_loan();
  if (!context_) return;
  if (phase_ != Phase::Idle) {
    dist::StreamGuard on_reduce_stream(context_->reduce_stream);
    work_.wait();
    phase_ = Phase::Idle;
  }
  for (at::Tensor* buffer : {&scattering_, &reduced_, &partial_, &collected_}) release(*buffer);
}

void GradientCollector::add_groups_to(dist::RegisteredMemory& memory) const {
  for (const auto& group : {config_.shard_group, config_.replicate_group, config_.summand_group})
    if (group) group->add_to(memory);
}

void GradientCollector::leave() {
  if (context_)
    leave_stream(work_, context_->reduce_stream, {scattering_, reduced_, partial_, collected_, flat_grad_});
  context_ = nullptr;
}

// Runs on the reduce stream, with this rank's sums in reduced_.
void GradientCollector::after_scatter() {
  phase_ = Phase::Idle;
  if (!config_.replicate_group) return sum_summands();
  if (partial_.defined()) {
    reduced_.add_(partial_);
    release(partial_);
  }
  if (!last_micro_batch_) {
    partial_ = std::exchange(reduced_, {});
    return;
  }
  work_ = config_.replicate_group->all_reduce(reduced_, dist::ReduceOp::Sum, {"fsdp::all_reduce", module_});
  phase_ = Phase::AllReducing;
}

void GradientCollector::sum_summands() {
  phase_ = Phase::Idle;
  if (!config_.summand_group) return accumulate(reduced_);
  const int64_t end = config_.num_summands < layout_.num_trainable()
                          ? layout_.slots()[config_.num_summands].offset
                          : layout_.trainable_numel();
  const at::Tensor summands = reduced_.narrow(0, 0, end);
  work_ = config_.summand_group->all_reduce(summands, dist::ReduceOp::Sum, {"tp::gradient", module_});
  phase_ = Phase::SummingSummands;
}

bool GradientCollector::advance_reduce() {
  if (phase_ == Phase::Idle) return true;
  at::NoGradGuard no_grad;
  dist::StreamGuard on_reduce_stream(context_->reduce_stream);
  work_.wait();
  if (phase_ == Phase::Scattering) {
    release(scattering_);
    after_scatter();
  } else if (phase_ == Phase::AllReducing) {
    sum_summands();
  } else {
    phase_ = Phase::Idle;
    accumulate(reduced_);
  }
  return phase_ == Phase::Idle;
}

void GradientCollector::accumulate(const at::Tensor& reduced) {
  if (reduced.is_same(flat_grad_)) {
    set_grads();
  } else if (no_grad_yet()) {
    flat_grad_.copy_(reduced, /*non_blocking=*/config_.to_host);
    set_grads();
  } else {
    TITAN_CHECK(
        all_grads_ours(),
        "the gradient of a sharded parameter was replaced by another tensor, or that of some parameters of a "
        "group was set to none and that of others not; zero all or none");
    if (config_.to_host && !arrived_.defined())
      arrived_ = host_empty(reduced.numel(), config_.grad_dtype, config_.device);
    // The copy to the host blocks, because the host adds the sums right after it.
    flat_grad_.add_(config_.to_host ? arrived_.copy_(reduced) : reduced);
  }
  release(reduced_);
}

}  // namespace titan::fsdp
