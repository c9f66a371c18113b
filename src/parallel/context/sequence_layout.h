#pragma once

// The tokens of a sequence that each rank holds, and the keys that their queries see.
//
// [Note: head and tail] Under a causal mask a late query has more keys than an early one. Cut into 2N chunks,
// of which rank r holds r and 2N-1-r, a sequence gives all ranks the same work: against the keys of a rank
// before it (by number), all its queries see that rank's first chunk and none the second; against those of a
// later rank, its second chunk sees both chunks and its first none; against its own, the mask is causal
// in the order in which they lie.

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

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

}  // namespace titan::context
