#include "parallel/context/key_values.h"

#include <array>
#include <utility>

#include <ATen/core/DimVector.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

namespace titan::context {

// Even ranks send first, odd ones receive first. A backend that runs its calls one after the other (NCCL)
// would deadlock if all of them sent first; this order works in a ring of any size.
void RingExchange::start(const at::Tensor& send, const at::Tensor& receive, dist::Label label) {
  const int rank = group_->rank(), size = group_->size();
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  if (rank % 2 == 0) sent_ = group_->send(send, next, label);
  received_ = group_->receive(receive, previous, label);
  if (rank % 2 != 0) sent_ = group_->send(send, next, label);
}

void RingExchange::wait() {
  received_.wait();
  sent_.wait();
}

at::Tensor KeyValues::pack(Scratch& memory) const {
  at::Tensor packed = memory.get({2, k.size(0), k.size(1), k.size(2), k.size(3)}, k.options());
  packed.select(0, 0).copy_(k);
  packed.select(0, 1).copy_(v);
  return packed;
}

namespace {

class GatherRotation final : public KeyValueRotation {
 public:
  explicit GatherRotation(std::shared_ptr<dist::Group> group) : group_(std::move(group)) {}

  void start(const KeyValues& own, dist::Label label) override {
    const at::Tensor packed = own.pack(own_);
    at::DimVector sizes(packed.sizes());
    sizes.insert(sizes.begin(), group_->size());
    gathered_ = all_.get(sizes, packed.options());
    gathering_ = group_->all_gather(gathered_, packed, label);
  }
  KeyValues hop(int i) override {
    gathering_.wait();
    return KeyValues::of_packed(gathered_.select(0, (group_->rank() - i + group_->size()) % group_->size()));
  }

 private:
  std::shared_ptr<dist::Group> group_;
  Scratch own_, all_;
  at::Tensor gathered_;  // [N, 2, B, S, K, E]
  dist::Work gathering_;
};

class NeighbourRotation final : public KeyValueRotation {
 public:
  explicit NeighbourRotation(std::shared_ptr<dist::Group> group)
      : num_ranks_(group->size()), exchange_(std::move(group)) {}

  void start(const KeyValues& own, dist::Label label) override {
    label_ = label;
    current_ = own.pack(buffers_[0]);
    next_ = buffers_[1].get(current_.sizes(), current_.options());
    exchange_.start(current_, next_, label_);
  }
  // The keys of the last block have been used and sent on: the next transfer overwrites them.
  KeyValues hop(int i) override {
    exchange_.wait();
    std::swap(current_, next_);
    if (i + 1 < num_ranks_) exchange_.start(current_, next_, label_);
    return KeyValues::of_packed(current_);
  }

 private:
  int num_ranks_;
  RingExchange exchange_;
  Scratch buffers_[2];
  at::Tensor current_, next_;
  dist::Label label_;
};

}  // namespace

std::unique_ptr<KeyValueRotation> make_rotation(std::shared_ptr<dist::Group> group,
                                                ContextRotateMethod method) {
  if (method == ContextRotateMethod::AllGather) return std::make_unique<GatherRotation>(std::move(group));
  return std::make_unique<NeighbourRotation>(std::move(group));
}

KeyValues GradientRing::start(const at::Tensor& k, at::ScalarType dtype, dist::Label label) {
  label_ = label;
  first_ = true;
  const std::array<int64_t, 5> sizes = {2, k.size(0), k.size(1), k.size(2), k.size(3)};
  const auto options = k.options().dtype(dtype);
  contributions_ = buffers_[0].get(sizes, options);
  sending_ = buffers_[1].get(sizes, options);
  received_ = buffers_[2].get(sizes, options);
  return KeyValues::of_packed(contributions_.zero_());
}

KeyValues GradientRing::next() { return KeyValues::of_packed(contributions_.zero_()); }

void GradientRing::pass_on(bool contributed) {
  if (!first_) {
    exchange_.wait();
    if (contributed) {
      contributions_.add_(received_);
    } else {
      std::swap(contributions_, received_);
    }
  }
  first_ = false;
  std::swap(contributions_, sending_);
  exchange_.start(sending_, received_, label_);
}

KeyValues GradientRing::finish() {
  exchange_.wait();
  return KeyValues::of_packed(received_);
}

}  // namespace titan::context
