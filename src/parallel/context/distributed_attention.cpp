#include "parallel/context/distributed_attention.h"

#include <string>
#include <utility>

#include <ATen/core/DimVector.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "ops/autograd_node.h"
#include "ops/saved_outputs.h"
#include "parallel/peer_memory.h"
#include "parallel/scratch.h"
#include "titan/core/error.h"
#include "titan/dist/world.h"

namespace titan::context {

SequenceLayout::SequenceLayout(int num_ranks, ContextLoadBalancer balancer)
    : num_ranks_(num_ranks), balancer_(balancer) {}

void SequenceLayout::check_length(int64_t length) const {
  if (length > 0 && length % num_chunks() == 0) return;
  const int64_t below = length / num_chunks() * num_chunks();
  throw Error(str("context parallelism: a sequence of ", length, " tokens can't be cut into ", num_chunks(),
                  " chunks, ", chunks_per_rank(), " for each of ", num_ranks_, " ranks; ",
                  below > 0 ? str(below, " or ") : "", below + num_chunks(), " would do",
                  balancer_ == ContextLoadBalancer::HeadTail && length > 0 && length % num_ranks_ == 0
                      ? ", as would this one without a load balancer"
                      : ""));
}

at::Tensor SequenceLayout::part(const at::Tensor& x, int64_t dim, int rank) const {
  const int64_t length = x.size(dim) / num_chunks();
  if (chunks_per_rank() == 1) return x.narrow(dim, chunk(rank, 0) * length, length).contiguous();
  return at::cat(
      {x.narrow(dim, chunk(rank, 0) * length, length), x.narrow(dim, chunk(rank, 1) * length, length)}, dim);
}

at::Tensor SequenceLayout::positions(int rank, int64_t rank_length, at::Device device) const {
  const at::Tensor all =
      at::arange(rank_length * num_ranks_, at::TensorOptions().dtype(at::kLong).device(device));
  return part(all, 0, rank);
}

std::optional<Block> SequenceLayout::block(int rank, int source, int64_t rank_length) const {
  const int64_t all = rank_length, half = rank_length / 2;
  if (source == rank) return Block{0, all, 0, all, /*first_query=*/0};
  if (balancer_ == ContextLoadBalancer::None) {
    if (source > rank) return std::nullopt;
    return Block{0, all, 0, all, /*first_query=*/all};
  }
  if (source < rank) return Block{0, all, 0, half, /*first_query=*/half};
  return Block{half, half, 0, all, /*first_query=*/all};
}

Block SequenceLayout::block_of_whole(int rank, int i, int64_t rank_length) const {
  const int64_t length = rank_length / chunks_per_rank(), position = chunk(rank, i) * length;
  return {i * length, length, 0, position + length, /*first_query=*/position};
}

namespace {

using ops::SavedVariable;
using torch::autograd::variable_list;

// Not an ops::BackwardNode: peers run their part of the backward even if this rank's loss doesn't depend on
// its output, so a missing gradient counts as zeros.
struct DistributedAttentionBackward final : torch::autograd::Node {
  SavedVariable q, k, v, out, log_sum_exp;
  std::shared_ptr<DistributedAttention> attention;
  const char* module = "";

  variable_list apply(variable_list&& grads) override {
    ops::refuse_second_derivative(*this);
    // Unpacked before the first collective: unpacking may make a checkpoint run the module again.
    const SavedAttention saved{q.unpack(), k.unpack(), v.unpack(), out.unpack(getptr()),
                               log_sum_exp.unpack()};
    const at::Tensor grad = grads[0].defined() ? grads[0] : at::zeros_like(saved.out);
    ops::BelowAutograd guard;
    const auto found = attention->backward(saved, grad, {"context_parallel::backward", module});
    const auto dtype = saved.q.scalar_type();
    return {found.q_BSHD.to(dtype), found.k_BTKD.to(dtype), found.v_BTKD.to(dtype)};
  }
  void release_variables() override {
    for (SavedVariable* saved : {&q, &k, &v, &out, &log_sum_exp}) saved->reset_data();
  }
  std::string name() const override { return "titan::distributed_attention backward"; }
};

using Result = std::tuple<at::Tensor, at::Tensor>;

// Blocks are computed from the number of a rank's tokens, so they would be wrong for a module that adds or
// drops tokens.
void check_inputs(const SequenceLayout& layout, const char* module, const at::Tensor& q, const at::Tensor& k,
                  const at::Tensor& v) {
  TITAN_CHECK(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == k.size(0) &&
                  q.size(1) == k.size(1) && q.size(3) == k.size(3) && k.size(2) > 0 &&
                  q.size(2) % k.size(2) == 0,
              "context parallelism: module '", module,
              "' has to attend with q [B, S, H, E] and k, v [B, S, K, E], H a multiple of K, got ", q.sizes(),
              ", ", k.sizes(), ", ", v.sizes());
  TITAN_CHECK(q.size(1) > 0 && q.size(1) % layout.chunks_per_rank() == 0, "context parallelism: module '",
              module, "' attends with ", q.size(1), " tokens of this rank, which holds ",
              layout.chunks_per_rank(), " chunks of one length; a module must not add or drop tokens");
}

}  // namespace

at::Tensor ContextCore::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  check_inputs(attention_->layout(), module_, q, k, v);
  std::shared_ptr<DistributedAttentionBackward> node;
  if (ops::compute_requires_grad(q, k, v)) {
    // Before the attention ([Note: kept outputs]).
    node = ops::make_node<DistributedAttentionBackward>(q, k, v);
    node->attention = attention_;
    node->module = module_;
    node->q = ops::save_input(q);
    node->k = ops::save_input(k);
    node->v = ops::save_input(v);
  }
  const auto [out, log_sum_exp] = ops::kept(ops::KeptKind::Attention, {}, [&]() -> Result {
    const ops::AttentionSum sum = attention_->forward(q, k, v, {"context_parallel::forward", module_});
    return {sum.out_BSHD.to(q.scalar_type()), sum.log_sum_exp_BHS};
  });
  if (!node) return out;
  ops::set_history(out, node);
  node->out = SavedVariable(out, /*is_output=*/true);
  node->log_sum_exp = ops::save_input(log_sum_exp);
  return out;
}

// Keys and values on their way between ranks.

namespace {

/// Sends a tensor to the next rank of a ring while receiving one from the previous rank. One at a time.
class RingExchange {
 public:
  virtual ~RingExchange() = default;
  /// `send` mustn't be written to, nor `receive` used, before wait(). Both contiguous, of the same size.
  virtual void start(const at::Tensor& send, const at::Tensor& receive, dist::Label label) = 0;
  virtual void wait() = 0;
};
using RingExchangePtr = std::unique_ptr<RingExchange>;

class MessageExchange final : public RingExchange {
 public:
  explicit MessageExchange(std::shared_ptr<dist::Group> group) : group_(std::move(group)) {}

  void start(const at::Tensor& send, const at::Tensor& receive, dist::Label label) override {
    const int rank = group_->rank(), size = group_->size();
    under_way_ = group_->exchange(send, (rank + 1) % size, receive, (rank + size - 1) % size, label);
  }
  void wait() override { under_way_.wait(); }

 private:
  std::shared_ptr<dist::Group> group_;
  dist::Exchange under_way_;
};

/// Each rank copies from the previous one's memory. The accesses are those of a gather in [Note: order of accesses to shared
/// memory].
class CopyExchange final : public RingExchange {
 public:
  explicit CopyExchange(std::unique_ptr<dist::SymmetricMemory> memory) : memory_(std::move(memory)) {}

  void start(const at::Tensor& send, const at::Tensor& receive, dist::Label /*label*/) override {
    const int rank = memory_->rank(), size = memory_->size();
    memory_->reserve(static_cast<int64_t>(send.nbytes()));
    memory_->write(rank, 0, send);
    memory_->barrier();
    memory_->read(receive, (rank + size - 1) % size, 0);
    memory_->barrier();
    done_ = memory_->now();
  }
  // Also for the second barrier: a recording ends with all work waited for.
  void wait() override { memory_->wait(done_); }

 private:
  std::unique_ptr<dist::SymmetricMemory> memory_;
  dist::SymmetricMemory::Moment done_ = 0;
};

// Sizes of the result of KeyValues::pack for the keys of one rank, or of several in order.
at::DimVector packed_sizes(const at::Tensor& k, int num_ranks = 1) {
  return {2, k.size(0), k.size(1) * num_ranks, k.size(2), k.size(3)};
}

at::DimVector sizes_by_rank(const at::Tensor& packed, int num_ranks) {
  at::DimVector sizes(packed.sizes());
  sizes.insert(sizes.begin(), num_ranks);
  return sizes;
}

/// One rank's k and v [B, S, K, E], or sums of their gradients.
struct KeyValues {
  at::Tensor k, v;
  static KeyValues of_packed(const at::Tensor& packed) { return {packed.select(0, 0), packed.select(0, 1)}; }
  /// Copies both into one message [2, B, S, K, E], allocated from `memory`.
  at::Tensor pack(Scratch& memory) const {
    at::Tensor packed = memory.get(packed_sizes(k), k.options());
    packed.select(0, 0).copy_(k);
    packed.select(0, 1).copy_(v);
    return packed;
  }
};

/// Rotates the keys and values of all ranks through this one. At hop i it has those of rank (r - i) mod N.
class KeyValueRotation {
 public:
  virtual ~KeyValueRotation() = default;
  virtual void start(const KeyValues& own, dist::Label label) = 0;
  /// Call it for i = 1 .. N-1 in order. Waits for the transfer of hop i and starts the next one. The result
  /// is valid until the next call.
  virtual KeyValues hop(int i) = 0;
};

class GatherRotation final : public KeyValueRotation {
 public:
  explicit GatherRotation(std::shared_ptr<dist::Group> group) : group_(std::move(group)) {}

  void start(const KeyValues& own, dist::Label label) override {
    const at::Tensor packed = own.pack(own_);
    gathered_ = all_.get(sizes_by_rank(packed, group_->size()), packed.options());
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

class NeighborRotation final : public KeyValueRotation {
 public:
  NeighborRotation(int num_ranks, RingExchangePtr exchange)
      : num_ranks_(num_ranks), exchange_(std::move(exchange)) {}

  void start(const KeyValues& own, dist::Label label) override {
    label_ = label;
    current_ = own.pack(buffers_[0]);
    next_ = buffers_[1].get(current_.sizes(), current_.options());
    exchange_->start(current_, next_, label_);
  }
  // The keys of the last block have been used and sent on: the next transfer overwrites them.
  KeyValues hop(int i) override {
    exchange_->wait();
    std::swap(current_, next_);
    if (i + 1 < num_ranks_) exchange_->start(current_, next_, label_);
    return KeyValues::of_packed(current_);
  }

 private:
  int num_ranks_;
  RingExchangePtr exchange_;
  Scratch buffers_[2];
  at::Tensor current_, next_;
  dist::Label label_;
};

/// Sums the contributions of all ranks to the gradients of each rank's keys and values. The sums travel
/// around the ring one hop after the keys. Rank r's contribution at hop i belongs to rank (r - i) mod N, as
/// does the sum that it receives from rank r - 1, which added its own contribution at hop i - 1. Transfers
/// run during the computation of the next hop. Sums are in fp32 (float64 for float64 inputs).
class GradientRing {
 public:
  explicit GradientRing(RingExchangePtr exchange) : exchange_(std::move(exchange)) {}

  /// Returns zeros, shaped by the keys `k`, to which the first hop adds its contributions.
  KeyValues start(const at::Tensor& k, at::ScalarType dtype, dist::Label label) {
    label_ = label;
    first_ = true;
    const at::DimVector sizes = packed_sizes(k);
    const auto options = k.options().dtype(dtype);
    contributions_ = buffers_[0].get(sizes, options);
    sending_ = buffers_[1].get(sizes, options);
    received_ = buffers_[2].get(sizes, options);
    return KeyValues::of_packed(contributions_.zero_());
  }
  /// The same for each later hop.
  KeyValues next() { return KeyValues::of_packed(contributions_.zero_()); }
  /// Passes on the sum so far, with this hop's contributions if `contributed`.
  void pass_on(bool contributed) {
    if (!first_) {
      exchange_->wait();
      if (contributed) {
        contributions_.add_(received_);
      } else {
        std::swap(contributions_, received_);
      }
    }
    first_ = false;
    std::swap(contributions_, sending_);
    exchange_->start(sending_, received_, label_);
  }
  /// The gradients of this rank's own keys, after the last hop. Valid until the next start().
  KeyValues finish() {
    exchange_->wait();
    return KeyValues::of_packed(received_);
  }

 private:
  Scratch buffers_[3];
  RingExchangePtr exchange_;
  dist::Label label_;
  at::Tensor contributions_, received_, sending_;  // packed
  bool first_ = true;
};

// Calls copy(a, b) for each chunk, where a is its part of by_rank [N, 2, B, S, ...] and b its part of
// in_order [2, B, N S, ...].
template <class Copy>
void for_each_chunk(const SequenceLayout& layout, const at::Tensor& by_rank, const at::Tensor& in_order,
                    Copy copy) {
  const int64_t length = by_rank.size(3) / layout.chunks_per_rank();
  for (int rank = 0; rank < layout.num_ranks(); ++rank)
    for (int i = 0; i < layout.chunks_per_rank(); ++i)
      copy(by_rank.select(0, rank).narrow(2, i * length, length),
           in_order.narrow(2, layout.chunk(rank, i) * length, length));
}

at::Tensor queries_of(const at::Tensor& x, const Block& block) {
  return x.narrow(1, block.first_row, block.num_rows);
}
at::Tensor keys_of(const at::Tensor& x, const Block& block) {
  return x.narrow(1, block.first_key, block.num_keys);
}

// Adds the attention of a block to `sum`.
void attend(const ops::AttentionSum& sum, const at::Tensor& q, const KeyValues& held, const Block& block) {
  ops::attend(sum.rows(block.first_row, block.num_rows),
              {queries_of(q, block), keys_of(held.k, block), keys_of(held.v, block)}, block.first_query);
}

// Adds a block's gradients to `sums`. `grad`: the whole output's gradient. `held`: the rank's tensors that
// contain the block's keys.
void attend_backward(const ops::AttentionGradients& sums, const at::Tensor& grad, const SavedAttention& saved,
                     const KeyValues& held, const Block& block) {
  ops::attend_backward(
      {queries_of(sums.q_BSHD, block), keys_of(sums.k_BTKD, block), keys_of(sums.v_BTKD, block)},
      queries_of(grad, block), {queries_of(saved.q, block), keys_of(held.k, block), keys_of(held.v, block)},
      {queries_of(saved.out, block), saved.log_sum_exp.narrow(2, block.first_row, block.num_rows)},
      block.first_query);
}

/// Gathers the keys and values of the whole sequence, puts them in order, and attends with each of the rank's
/// chunks once. The backward gathers them again; gradients are summed over the ranks by one reduce-scatter,
/// in fp32 (float64 for float64 inputs).
class GatheredAttention final : public DistributedAttention {
 public:
  GatheredAttention(std::shared_ptr<dist::Group> group, SequenceLayout layout)
      : DistributedAttention(layout), group_(std::move(group)) {}

  ops::AttentionSum forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            dist::Label label) override {
    const auto sum = ops::AttentionSum::of_no_keys(q);
    const KeyValues whole = gather({k, v}, label);
    for (int i = 0; i < layout().chunks_per_rank(); ++i)
      attend(sum, q, whole, layout().block_of_whole(group_->rank(), i, q.size(1)));
    return sum;
  }
  ops::AttentionGradients backward(const SavedAttention& saved, const at::Tensor& grad,
                                   dist::Label label) override {
    const KeyValues whole = gather({saved.k, saved.v}, label);
    const auto options = saved.q.options().dtype(saved.log_sum_exp.scalar_type());
    const at::Tensor grad_q = at::zeros(saved.q.sizes(), options);
    const at::Tensor grads = gradients_.get(packed_sizes(saved.k, group_->size()), options).zero_();
    for (int i = 0; i < layout().chunks_per_rank(); ++i)
      attend_backward({grad_q, grads.select(0, 0), grads.select(0, 1)}, grad, saved, whole,
                      layout().block_of_whole(group_->rank(), i, saved.q.size(1)));
    const KeyValues own = reduce(grads, label);
    return {grad_q, own.k, own.v};
  }

 private:
  KeyValues gather(const KeyValues& own, dist::Label label) {
    const at::Tensor packed = own.pack(own_);
    const at::Tensor by_rank = by_rank_.get(sizes_by_rank(packed, group_->size()), packed.options());
    group_->all_gather(by_rank, packed, label).wait();
    const at::Tensor in_order = in_order_.get(packed_sizes(own.k, group_->size()), packed.options());
    for_each_chunk(layout(), by_rank, in_order,
                   [](const at::Tensor& from, const at::Tensor& to) { to.copy_(from); });
    return KeyValues::of_packed(in_order);
  }
  KeyValues reduce(const at::Tensor& whole, dist::Label label) {
    const int num_ranks = group_->size();
    at::DimVector sizes(whole.sizes());
    sizes[2] /= num_ranks;
    const at::Tensor own = at::empty(sizes, whole.options());
    const at::Tensor by_rank = by_rank_.get(sizes_by_rank(own, num_ranks), whole.options());
    for_each_chunk(layout(), by_rank, whole,
                   [](const at::Tensor& to, const at::Tensor& from) { to.copy_(from); });
    group_->reduce_scatter(own, by_rank, label).wait();
    return KeyValues::of_packed(own);
  }

  std::shared_ptr<dist::Group> group_;
  Scratch own_, by_rank_, in_order_, gradients_;
};

/// [Note: ring attention]
/// At hop i rank r has the keys and values of rank (r - i) mod N, and adds its queries' attention over them
/// to a sum in fp32 ([Note: attention in parts]) while the keys of hop i + 1 travel. In the backward, keys
/// travel around the ring again; each hop adds to the gradients of the rank's own queries and to those of the
/// current keys, which follow their keys around the ring and end at the keys' own rank.
class RingAttention final : public DistributedAttention {
 public:
  RingAttention(int rank, SequenceLayout layout, std::unique_ptr<KeyValueRotation> rotation,
                RingExchangePtr gradients)
      : DistributedAttention(layout),
        rank_(rank),
        num_ranks_(layout.num_ranks()),
        rotation_(std::move(rotation)),
        gradient_ring_(std::move(gradients)) {}

  ops::AttentionSum forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            dist::Label label) override {
    const auto sum = ops::AttentionSum::of_no_keys(q);
    KeyValues held{k, v};
    rotation_->start(held, label);
    for (int hop = 0; hop < num_ranks_; ++hop) {
      if (hop > 0) held = rotation_->hop(hop);
      if (const auto block = block_at(hop, q.size(1))) attend(sum, q, held, *block);
    }
    return sum;
  }
  ops::AttentionGradients backward(const SavedAttention& saved, const at::Tensor& grad,
                                   dist::Label label) override {
    const at::ScalarType dtype = saved.log_sum_exp.scalar_type();
    const at::Tensor grad_q = at::zeros(saved.q.sizes(), saved.q.options().dtype(dtype));
    KeyValues held{saved.k, saved.v};
    rotation_->start(held, label);
    KeyValues contributions = gradient_ring_.start(saved.k, dtype, label);
    for (int hop = 0; hop < num_ranks_; ++hop) {
      if (hop > 0) {
        held = rotation_->hop(hop);
        contributions = gradient_ring_.next();
      }
      const auto block = block_at(hop, saved.q.size(1));
      if (block) attend_backward({grad_q, contributions.k, contributions.v}, grad, saved, held, *block);
      gradient_ring_.pass_on(block.has_value());
    }
    const KeyValues own = gradient_ring_.finish();
    // The next layer reuses the ring's memory, so these are copies, already rounded.
    const auto copy = [&](const at::Tensor& x) {
      return x.to(saved.k.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    };
    return {grad_q, copy(own.k), copy(own.v)};
  }

 private:
  std::optional<Block> block_at(int hop, int64_t rank_length) const {
    return layout().block(rank_, (rank_ - hop + num_ranks_) % num_ranks_, rank_length);
  }

  int rank_, num_ranks_;
  std::unique_ptr<KeyValueRotation> rotation_;
  GradientRing gradient_ring_;
};

}  // namespace

std::unique_ptr<DistributedAttention> make_attention(std::shared_ptr<dist::Group> group,
                                                     std::shared_ptr<dist::Group> gradient_group,
                                                     SequenceLayout layout,
                                                     const ContextParallelOptions& options) {
  if (options.attention == ContextAttention::AllGatherKv)
    return std::make_unique<GatheredAttention>(std::move(group), layout);
  const int rank = group->rank(), size = group->size();
  std::unique_ptr<KeyValueRotation> rotation;
  if (options.rotate_method == ContextRotateMethod::AllGather)
    rotation = std::make_unique<GatherRotation>(std::move(group));
  else
    rotation = std::make_unique<NeighborRotation>(size, std::make_unique<MessageExchange>(std::move(group)));
  return std::make_unique<RingAttention>(rank, layout, std::move(rotation),
                                         std::make_unique<MessageExchange>(std::move(gradient_group)));
}

std::unique_ptr<DistributedAttention> make_attention(const DeviceMesh& axis, SequenceLayout layout,
                                                     const ContextParallelOptions& options) {
  const auto group = axis.group();
  if (options.attention == ContextAttention::AllGatherKv)
    return make_attention(group, nullptr, layout, options);
  // Where no rank is real, copies are recorded as messages.
  if (options.rotate_method == ContextRotateMethod::SymmetricMemory && group->backend_name() != "fake") {
    if (const std::string why = why_no_peer_memory(axis); !why.empty())
      throw ConfigError("parallelism.context_parallel_rotate_method = \"symmetric_memory\": " + why);
    return make_ring_attention(make_peer_memory(axis), make_peer_memory(axis), layout);
  }
  const auto long_receives = [&](const char* purpose) {
    return axis.world().group(axis.ranks(), group->name(), str(dist::kLongReceives, purpose));
  };
  return make_attention(
      options.rotate_method == ContextRotateMethod::AllGather ? group : long_receives("ring"),
      long_receives("gradient_ring"), layout, options);
}

std::unique_ptr<DistributedAttention> make_ring_attention(std::unique_ptr<dist::SymmetricMemory> keys,
                                                          std::unique_ptr<dist::SymmetricMemory> gradients,
                                                          SequenceLayout layout) {
  const int rank = keys->rank();
  return std::make_unique<RingAttention>(
      rank, layout,
      std::make_unique<NeighborRotation>(layout.num_ranks(), std::make_unique<CopyExchange>(std::move(keys))),
      std::make_unique<CopyExchange>(std::move(gradients)));
}

}  // namespace titan::context
