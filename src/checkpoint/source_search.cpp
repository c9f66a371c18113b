#include "checkpoint/source_search.h"

#include <algorithm>

#include "checkpoint/rank_digits.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};

// Which of the `parts` chunks of `whole` have elements of `wanted`.
Range chunks_that_meet(const titan::Chunk& wanted, const titan::Chunk& whole, int64_t parts) {
  const int64_t begin = std::max(whole.offset, wanted.offset) - whole.offset;
  const int64_t end = std::min(whole.offset + whole.length, wanted.offset + wanted.length) - whole.offset;
  if (begin >= end) return {};
  const int64_t length = padded_chunk_length(whole.length, parts);
  return {begin / length, (end - 1) / length + 1};
}

titan::Chunk along(const Box& box, size_t dim) { return {box.offset[dim], box.length[dim]}; }

void cut(Box& box, size_t dim, int64_t parts, int64_t index) {
  const titan::Chunk chunk = chunk_of(box.length[dim], parts, index);
  box.offset[dim] += chunk.offset;
  box.length[dim] = chunk.length;
}

class Search {
 public:
  Search(const StateTensor& tensor, const Box& wanted, int64_t world_size, int64_t num_pieces,
         int64_t first_writer)
      : layout_(*tensor.layout),
        wanted_(wanted),
        world_size_(world_size),
        copies_(num_replicas(layout_, world_size)),
        num_pieces_(num_pieces),
        first_writer_(first_writer) {}

  // `part`: what the ranks have whose positions on the axes before `axis` are those of `rank`.
  void visit(size_t axis_index, const Box& part, int64_t rank) {
    if (axis_index == layout_.axes.size()) return add_pieces(part, rank);
    const LayoutAxis& axis = layout_.axes[axis_index];
    if (axis.only != -1) return visit(axis_index + 1, part, rank + axis.only * axis.stride);
    const auto dim = static_cast<size_t>(axis.dim);
    const Range meeting = chunks_that_meet(along(wanted_, dim), along(part, dim), axis.size);
    for (int64_t position = meeting.begin; position < meeting.end; ++position) {
      Box smaller = part;
      cut(smaller, dim, axis.size, position);
      visit(axis_index + 1, smaller, rank + position * axis.stride);
    }
  }

  std::vector<Source> take() {
    std::sort(sources_.begin(), sources_.end(),
              [](const Source& a, const Source& b) { return a.rank < b.rank; });
    return std::move(sources_);
  }

 private:
  void add_pieces(const Box& part, int64_t rank) {
    Range meeting{0, 1};
    if (num_pieces_ > 1) meeting = chunks_that_meet(along(wanted_, 0), along(part, 0), num_pieces_);
    for (int64_t piece = meeting.begin; piece < meeting.end; ++piece) {
      const int64_t copy = (first_writer_ + piece) % copies_;
      sources_.push_back(
          {rank + rank_of_replica(layout_, world_size_, copy), piece_of(part, num_pieces_, piece)});
    }
  }

  const TensorLayout& layout_;
  const Box& wanted_;
  int64_t world_size_;
  int64_t copies_;
  int64_t num_pieces_;
  int64_t first_writer_;
  std::vector<Source> sources_;
};

void check_wanted(const StateTensor& tensor, const Box& wanted) {
  const std::vector<int64_t>& shape = tensor.shape;
  bool inside = wanted.offset.size() == shape.size() && wanted.length.size() == shape.size();
  for (size_t dim = 0; inside && dim < shape.size(); ++dim)
    inside = wanted.offset[dim] >= 0 && wanted.length[dim] >= 0 && wanted.offset[dim] <= shape[dim] &&
             wanted.length[dim] <= shape[dim] - wanted.offset[dim];
  TITAN_CHECK(inside, "tensor '", tensor.name, "': a box is wanted that isn't inside the tensor");
}

}  // namespace

Box piece_of(Box part, int64_t num_pieces, int64_t index) {
  if (num_pieces > 1) cut(part, 0, num_pieces, index);
  return part;
}

std::vector<Source> search_sources(const StateTensor& tensor, const Box& wanted, int64_t world_size,
                                   int64_t num_pieces, int64_t first_writer) {
  check_wanted(tensor, wanted);
  if (wanted.numel() == 0) return {};
  Search search(tensor, wanted, world_size, num_pieces, first_writer);
  search.visit(0, {std::vector<int64_t>(tensor.shape.size(), 0), tensor.shape}, 0);
  return search.take();
}

}  // namespace titan::checkpoint::detail
