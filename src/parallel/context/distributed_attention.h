#pragma once

// Attention over the ranks of a context-parallel group, by a ring or with gathered keys: which tokens of a
// sequence each rank holds, and which keys their queries see.
//
// [Note: head and tail] Under a causal mask a late query has more keys than an early one. Cut into 2N chunks,
// of which rank r holds r and 2N-1-r, a sequence gives all ranks the same work: against the keys of a rank
// before it (by number), all its queries see that rank's first chunk and none the second; against those of a
// later rank, its second chunk sees both chunks and its first none; against its own, the mask is causal
// in the order in which they lie.

#include <cstdint>
#include <memory>
#include <optional>

#include "titan/dist/collectives.h"
#include "titan/nn/layers.h"
#include "titan/ops/functional.h"
#include "titan/parallel/context_parallel.h"

namespace titan::context {

/// Queries and keys that meet, in rows of what the two ranks hold; as ops::attend takes them.
struct Block {
  int64_t first_row, num_rows;  // of the queries
  int64_t first_key, num_keys;
  int64_t first_query;  // query i (of these rows) sees the keys 0 .. first_query + i (of these)
};

class SequenceLayout {
 public:
  SequenceLayout(int num_ranks, ContextLoadBalancer balancer);

  int num_ranks() const { return num_ranks_; }
  int chunks_per_rank() const { return balancer_ == ContextLoadBalancer::HeadTail ? 2 : 1; }
  int num_chunks() const { return num_ranks_ * chunks_per_rank(); }
  /// The number of the chunk that is the rank's `i`-th. Ascending in i.
  int chunk(int rank, int i) const { return i == 0 ? rank : num_chunks() - 1 - rank; }

  /// Throws Error that names valid lengths.
  void check_length(int64_t length) const;

  /// The rank's tokens of x, whose `dim` runs along the whole sequence. Contiguous.
  at::Tensor part(const at::Tensor& x, int64_t dim, int rank) const;
  /// int64 [rank_length]: the positions of the rank's tokens.
  at::Tensor positions(int rank, int64_t rank_length, at::Device device) const;

  /// The block of queries of `rank` and keys of `source` that meet, each holding rank_length tokens.
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

std::unique_ptr<DistributedAttention> make_attention(std::shared_ptr<dist::Group> group,
                                                     SequenceLayout layout,
                                                     const ContextParallelOptions& options);

/// For one module, whose name is in the records of collectives. `module` outlives the process's groups.
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
