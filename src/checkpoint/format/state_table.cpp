#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <vector>

#include "checkpoint/format/names.h"
#include "checkpoint/format/rank_digits.h"
#include "checkpoint/format/safetensors_header.h"
#include "core/utf8.h"
#include "titan/checkpoint/manifest.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

constexpr size_t kMaxNameBytes = 1000;
constexpr std::string_view kMetadataKey = "__metadata__";  // of safetensors headers

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

}  // namespace

std::string name_problem(std::string_view name) {
  if (name.empty()) return "is empty";
  if (name.size() > kMaxNameBytes)
    return str("has ", name.size(), " bytes; at most ", kMaxNameBytes, " are allowed");
  // Before the name is shown.
  if (std::any_of(name.begin(), name.end(), is_control)) return "contains control characters";
  if (valid_utf8_prefix(name) != name.size()) return "isn't UTF-8";
  for (std::string_view part : {"/", "\\", ".."})
    if (name.find(part) != std::string_view::npos) return str("'", name, "' contains '", part, "'");
  if (name == kMetadataKey) return str("'", name, "' is one that safetensors keeps for itself");
  return "";
}

// Which ranks' pieces have elements of a box: a walk over the axes that goes to the positions that meet it,
// and to no other.

/// Piece `index` of `num_pieces` of a part: rows by chunk_of, may be empty. A scalar is one piece.
Box piece_of(Box part, int64_t num_pieces, int64_t index);

/// StateTable::sources_of, of a tensor whose layout was checked.
std::vector<Source> search_sources(const StateTensor& tensor, const Box& wanted, int64_t world_size,
                                   int64_t num_pieces, int64_t first_writer);

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

namespace titan::checkpoint {

// [Note: who writes what]
// A part that several ranks have is cut into about as many pieces as it has MiB, at most one for each of them
// and for each row. The copies of a layout's parts are dealt these pieces in turn, the largest first: then no
// copy has more to write than another by more than one piece. The parts of a tensor are all dealt as the
// first one is, the largest.

namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 20;
// Whoever sums up what a file says can't overflow.
constexpr int64_t kMaxBytes = int64_t{1} << 62;

int64_t element_size(const StateTensor& tensor) {
  return static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

bool in_file_order(const StateTensor& a, const StateTensor& b) {
  const int64_t size_a = element_size(a), size_b = element_size(b);
  return size_a != size_b ? size_a > size_b : a.name < b.name;
}

void check_names(const std::vector<StateTensor>& tensors) {
  std::vector<std::string_view> names;
  for (const StateTensor& tensor : tensors) {
    const std::string problem = detail::name_problem(tensor.name);
    TITAN_CHECK(problem.empty(), "a tensor's name ", problem);
    names.push_back(tensor.name);
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  TITAN_CHECK(twice == names.end(), "two tensors are named '", *twice, "'");
}

void check_axis_names(const TensorLayout& layout) {
  for (const LayoutAxis& axis : layout.axes) {
    const std::string problem = detail::name_problem(axis.name);
    TITAN_CHECK(problem.empty(), "an axis' name ", problem);
  }
}

// Equal layouts become one object.
class SharedLayouts {
 public:
  void share(std::shared_ptr<const TensorLayout>& layout) {
    const auto [known, is_new] = known_.try_emplace(*layout, layout);
    if (is_new) check_axis_names(*layout);
    layout = known->second;
  }

 private:
  std::map<TensorLayout, std::shared_ptr<const TensorLayout>> known_;
};

void check_tensor(const StateTensor& tensor, int64_t world_size) {
  try {
    TITAN_CHECK(tensor.layout, "it has no layout");
    titan::detail::safetensors_name_of(tensor.dtype);
    check_layout(*tensor.layout, tensor.shape, world_size);
  } catch (const Error& error) {
    throw Error(str("tensor '", tensor.name, "': ", error.what()));
  }
}

// A tensor's own are far below what an int64_t holds (check_layout).
void check_total_size(const std::vector<StateTensor>& tensors) {
  int64_t total = 0;
  for (const StateTensor& tensor : tensors) {
    int64_t num_bytes = element_size(tensor);
    for (const int64_t size : tensor.shape) num_bytes *= size;
    const bool overflows = __builtin_add_overflow(total, num_bytes, &total);
    TITAN_CHECK(!overflows && total <= kMaxBytes, "tensors of more than ", kMaxBytes,
                " bytes together, up to '", tensor.name, "'");
  }
}

// How many pieces each part has. Where rows don't come out even, fewer pieces may have as many rows.
int64_t num_pieces_of(const Box& largest_part, int64_t num_bytes, int64_t num_replicas) {
  if (largest_part.length.empty() || num_bytes == 0) return 1;
  const int64_t rows = largest_part.length[0];
  const int64_t pieces = std::clamp<int64_t>(num_bytes / kPieceBytes, 1, std::min(num_replicas, rows));
  const int64_t rows_each = padded_chunk_length(rows, pieces);
  return (rows + rows_each - 1) / rows_each;
}

// Position 0 on every axis that cuts has the largest part.
Box largest_part_of(const StateTensor& tensor) { return box_of(*tensor.layout, tensor.shape, 0); }

}  // namespace

StateTable::StateTable(std::vector<StateTensor> tensors, int64_t world_size)
    : tensors_(std::move(tensors)), splits_(tensors_.size()), world_size_(world_size) {
  check_names(tensors_);
  SharedLayouts layouts;
  for (StateTensor& tensor : tensors_) {
    check_tensor(tensor, world_size_);
    layouts.share(tensor.layout);
  }
  check_total_size(tensors_);
  std::sort(tensors_.begin(), tensors_.end(), in_file_order);
  deal_pieces();
}

void StateTable::deal_pieces() {
  std::vector<int64_t> piece_bytes;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Box part = largest_part_of(tensors_[i]);
    const int64_t num_bytes = part.numel() * element_size(tensors_[i]);
    splits_[i].num_pieces = num_pieces_of(part, num_bytes, num_replicas(*tensors_[i].layout, world_size_));
    piece_bytes.push_back(num_bytes / splits_[i].num_pieces);
  }
  std::vector<size_t> largest_first(tensors_.size());
  std::iota(largest_first.begin(), largest_first.end(), size_t{0});
  std::stable_sort(largest_first.begin(), largest_first.end(),
                   [&](size_t a, size_t b) { return piece_bytes[a] > piece_bytes[b]; });
  std::map<const TensorLayout*, int64_t> dealt;
  for (size_t i : largest_first) {
    const TensorLayout& layout = *tensors_[i].layout;
    int64_t& pieces = dealt[&layout];
    splits_[i].first_writer = pieces % num_replicas(layout, world_size_);
    pieces += splits_[i].num_pieces;
  }
}

std::optional<size_t> StateTable::find(std::string_view name) const {
  // Sorted by name within each element size.
  for (auto begin = tensors_.begin(); begin != tensors_.end();) {
    const auto end = std::partition_point(begin, tensors_.end(), [&](const StateTensor& tensor) {
      return element_size(tensor) == element_size(*begin);
    });
    const auto found = std::lower_bound(
        begin, end, name,
        [](const StateTensor& tensor, std::string_view wanted) { return tensor.name < wanted; });
    if (found != end && found->name == name) return static_cast<size_t>(found - tensors_.begin());
    begin = end;
  }
  return std::nullopt;
}

std::vector<Piece> StateTable::pieces_of(int64_t rank) const {
  TITAN_CHECK(rank >= 0 && rank < world_size_, "no rank ", rank, " of ", world_size_);
  std::vector<Piece> pieces;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const TensorLayout& layout = *tensors_[i].layout;
    if (!holds(layout, rank)) continue;
    const int64_t copies = num_replicas(layout, world_size_);
    const int64_t copy = replica_of(layout, world_size_, rank);
    const int64_t piece = (copy - splits_[i].first_writer + copies) % copies;
    if (piece >= splits_[i].num_pieces) continue;
    Box box = detail::piece_of(box_of(layout, tensors_[i].shape, rank), splits_[i].num_pieces, piece);
    if (box.numel() > 0) pieces.push_back({i, std::move(box)});
  }
  return pieces;
}

std::vector<Source> StateTable::sources_of(size_t tensor, const Box& wanted) const {
  TITAN_CHECK(tensor < tensors_.size(), "no tensor ", tensor, " of ", tensors_.size());
  const Split& split = splits_[tensor];
  return detail::search_sources(tensors_[tensor], wanted, world_size_, split.num_pieces, split.first_writer);
}

}  // namespace titan::checkpoint
