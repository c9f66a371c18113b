#pragma once

// Attention over the ranks of a context-parallel group, by a ring or with gathered keys: which tokens of a
// sequence each rank holds, and which keys their queries see.
//
// [Note: head and tail] Under a causal mask a late query has more keys than an early one. A sequence cut into
// 2N chunks, where rank r holds chunks r and 2N-1-r, gives all ranks the same work. Against the keys of a
// lower rank, all queries of rank r see that rank's first chunk and none sees its second. Against the keys of
// a higher rank, the second chunk's queries see both chunks and the first chunk's see none. Against its own
// keys, the mask is causal in the order in which they are stored.

#include <cstdint>
#include <memory>
#include <optional>

#include "dist/device_backend.h"
#include "titan/dist/collectives.h"
#include "titan/dist/device_mesh.h"
#include "titan/nn/layers.h"
#include "titan/ops/functional.h"
#include "titan/parallel/context_parallel.h"

namespace titan::context {

/// A block of queries that see a block of keys, as rows of the two ranks' tensors; the form that ops::attend
/// takes.
struct Block {
  int64_t first_row, num_rows;  // the queries
  int64_t first_key, num_keys;
  int64_t first_query;  // the block's query i sees the block's keys 0 .. first_query + i
};

class SequenceLayout {
 public:
  SequenceLayout(int num_ranks, ContextLoadBalancer balancer);

  int num_ranks() const { return num_ranks_; }
  int chunks_per_rank() const { return balancer_ == ContextLoadBalancer::HeadTail ? 2 : 1; }
  int num_chunks() const { return num_ranks_ * chunks_per_rank(); }
  /// The number of the rank's `i`-th chunk; ascending in i.
  int chunk(int rank, int i) const { return i == 0 ? rank : num_chunks() - 1 - rank; }

  /// Throws Error that names valid lengths.
  void check_length(int64_t length) const;

  /// The rank's tokens of x, contiguous. Dimension `dim` of x is the whole sequence.
  at::Tensor part(const at::Tensor& x, int64_t dim, int rank) const;
  /// int64 [rank_length]: the positions of the rank's tokens.
  at::Tensor positions(int rank, int64_t rank_length, at::Device device) const;

  /// The queries of `rank` that see keys of `source`, and those keys. Each rank holds rank_length tokens.
  std::optional<Block> block(int rank, int source, int64_t rank_length) const;
  /// The rank's i-th chunk of queries against the keys of the whole sequence, in order.
  Block block_of_whole(int rank, int i, int64_t rank_length) const;

 private:
  int num_ranks_;
  ContextLoadBalancer balancer_;
};

/// This rank's part of a forward, for the backward. Sizes as in ops::AttentionSum.
struct SavedAttention {
  at::Tensor q, k, v, out, log_sum_exp;
};

/// Attention that the ranks of a group compute together. One object serves all modules of a model, one call
/// at a time, because it reuses its buffers.
class DistributedAttention {
 public:
  explicit DistributedAttention(SequenceLayout layout) : layout_(layout) {}
  virtual ~DistributedAttention() = default;
  const SequenceLayout& layout() const { return layout_; }
  /// Attention of this rank's queries over the keys of all ranks.
  virtual ops::AttentionSum forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    dist::Label label) = 0;
  /// Whole gradients of this rank's queries, keys and values. Summed in at least fp32; a gradient may be
  /// rounded to its tensor's dtype.
  virtual ops::AttentionGradients backward(const SavedAttention& saved, const at::Tensor& grad,
                                           dist::Label label) = 0;

 private:
  SequenceLayout layout_;
};

/// Collective. Throws ConfigError on all ranks of the axis if symmetric memory was asked for and they can't share any.
std::unique_ptr<DistributedAttention> make_attention(const DeviceMesh& axis, SequenceLayout layout,
                                                     const ContextParallelOptions& options);

/// `gradient_group`: the same ranks, for the gradients in a ring, which then needn't wait for the keys that
/// travel at the same time. Unused without a ring.
std::unique_ptr<DistributedAttention> make_attention(std::shared_ptr<dist::Group> group,
                                                     std::shared_ptr<dist::Group> gradient_group,
                                                     SequenceLayout layout,
                                                     const ContextParallelOptions& options);

/// A ring whose ranks copy keys, and gradients of keys, from each other's memory.
std::unique_ptr<DistributedAttention> make_ring_attention(std::unique_ptr<dist::SymmetricMemory> keys,
                                                          std::unique_ptr<dist::SymmetricMemory> gradients,
                                                          SequenceLayout layout);

/// The core of one module, whose name is in the records of collectives. `module` outlives the process's
/// groups.
class ContextCore final : public nn::AttentionCore {
 public:
  ContextCore(std::shared_ptr<DistributedAttention> attention, const char* module)
      : attention_(std::move(attention)), module_(module) {}
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) override;

 private:
  std::shared_ptr<DistributedAttention> attention_;
  const char* module_;
};

}  // namespace titan::context
