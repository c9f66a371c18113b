#include "parallel/context/sequence_layout.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

#include "titan/core/error.h"

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

}  // namespace titan::context
