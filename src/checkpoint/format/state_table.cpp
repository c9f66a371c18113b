#include <algorithm>
#include <map>
#include <numeric>

#include "checkpoint/format/names.h"
#include "checkpoint/format/safetensors_header.h"
#include "core/utf8.h"
#include "titan/checkpoint/manifest.h"
#include "titan/core/error.h"

// [Note: which rank writes what] A part that several ranks hold is cut into about as many pieces as it has
// MiB, at most one per copy and one per row. The pieces are dealt to the copies of a layout's parts in turn,
// the largest first: then no copy has more to write than another by more than one piece. All parts of a
// tensor are dealt as its first one is, the largest.

namespace titan::checkpoint {
namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 20;
// Sums of sizes that a file claims can't overflow.
constexpr int64_t kMaxBytes = int64_t{1} << 62;
constexpr size_t kMaxNameBytes = 1000;
constexpr std::string_view kMetadataKey = "__metadata__";  // of safetensors headers

int64_t element_size(const StateTensor& tensor) {
  return static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

// ---- checks

void check_names(const std::vector<StateTensor>& tensors) {
  std::vector<std::string_view> names;
  for (const StateTensor& tensor : tensors) {
    const std::string problem = detail::name_problem(tensor.name);
    TITAN_CHECK(problem.empty(), "a tensor's name ", problem);
    names.push_back(tensor.name);
  }
  std::sort(names.begin(), names.end());
  const auto duplicate = std::adjacent_find(names.begin(), names.end());
  TITAN_CHECK(duplicate == names.end(), "two tensors are named '", *duplicate, "'");
}

void check_axis_names(const TensorLayout& layout) {
  for (const LayoutAxis& axis : layout.axes) {
    const std::string problem = detail::name_problem(axis.name);
    TITAN_CHECK(problem.empty(), "an axis' name ", problem);
  }
}

void check_tensor(const StateTensor& tensor, int64_t world_size) {
  try {
    TITAN_CHECK(tensor.layout, "it has no layout");
    titan::detail::safetensors_name_of(tensor.dtype);
    check_layout(*tensor.layout, tensor.shape, world_size);
  } catch (const Error& error) {
    throw Error(str("tensor '", tensor.name, "': ", error.what()));
  }
}

// One tensor's size is far below what an int64_t holds (check_layout).
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

void check_wanted(const StateTensor& tensor, const Box& wanted) {
  const std::vector<int64_t>& shape = tensor.shape;
  bool inside = wanted.offset.size() == shape.size() && wanted.length.size() == shape.size();
  for (size_t dim = 0; inside && dim < shape.size(); ++dim)
    inside = wanted.offset[dim] >= 0 && wanted.length[dim] >= 0 && wanted.offset[dim] <= shape[dim] &&
             wanted.length[dim] <= shape[dim] - wanted.offset[dim];
  TITAN_CHECK(inside, "tensor '", tensor.name, "': the wanted box isn't inside the tensor");
}

// ---- cutting

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};

// Which of the `parts` chunks of `whole` have elements of `wanted`.
Range intersecting_chunks(const titan::Chunk& wanted, const titan::Chunk& whole, int64_t parts) {
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

// Piece `index` of a part: rows by chunk_of; may be empty. A scalar is one piece.
Box piece_of(Box part, int64_t num_pieces, int64_t index) {
  if (num_pieces > 1) cut(part, 0, num_pieces, index);
  return part;
}

// How many pieces each part has. Where rows don't divide evenly, fewer pieces may have as many rows.
int64_t num_pieces_of(const Box& largest_part, int64_t num_bytes, int64_t num_replicas) {
  if (largest_part.length.empty() || num_bytes == 0) return 1;
  const int64_t rows = largest_part.length[0];
  const int64_t pieces = std::clamp<int64_t>(num_bytes / kPieceBytes, 1, std::min(num_replicas, rows));
  const int64_t rows_each = padded_chunk_length(rows, pieces);
  return (rows + rows_each - 1) / rows_each;
}

}  // namespace

std::string detail::name_problem(std::string_view name) {
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  if (name.empty()) return "is empty";
  if (name.size() > kMaxNameBytes)
    return str("has ", name.size(), " bytes; at most ", kMaxNameBytes, " are allowed");
  // Before the name is shown.
  if (std::any_of(name.begin(), name.end(), is_control)) return "contains control characters";
  if (valid_utf8_prefix(name) != name.size()) return "isn't UTF-8";
  for (std::string_view part : {"/", "\\", ".."})
    if (name.find(part) != std::string_view::npos) return str("'", name, "' contains '", part, "'");
  if (name == kMetadataKey) return str("'", name, "' is reserved by safetensors");
  return "";
}

StateTable::StateTable(std::vector<StateTensor> tensors, int64_t world_size)
    : tensors_(std::move(tensors)), splits_(tensors_.size()), world_size_(world_size) {
  check_names(tensors_);
  std::map<TensorLayout, std::shared_ptr<const TensorLayout>> known;  // equal layouts become one object
  for (StateTensor& tensor : tensors_) {
    check_tensor(tensor, world_size_);
    const auto [layout, is_new] = known.try_emplace(*tensor.layout, tensor.layout);
    if (is_new) check_axis_names(*tensor.layout);
    tensor.layout = layout->second;
  }
  check_total_size(tensors_);
  std::sort(tensors_.begin(), tensors_.end(), [](const StateTensor& a, const StateTensor& b) {
    const int64_t size_a = element_size(a), size_b = element_size(b);
    return size_a != size_b ? size_a > size_b : a.name < b.name;
  });
  deal_pieces();
}

void StateTable::deal_pieces() {
  std::vector<int64_t> piece_bytes;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    // Position 0 on every axis that splits has the largest part.
    const Box part = box_of(*tensors_[i].layout, tensors_[i].shape, 0);
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
    Box box = piece_of(box_of(layout, tensors_[i].shape, rank), splits_[i].num_pieces, piece);
    if (box.numel() > 0) pieces.push_back({i, std::move(box)});
  }
  return pieces;
}

// Walks over the layout's axes, visiting only the positions whose parts intersect the wanted box.
class StateTable::Search {
 public:
  Search(const StateTable& table, size_t tensor, const Box& wanted)
      : table_(table),
        layout_(*table.tensors_[tensor].layout),
        split_(table.splits_[tensor]),
        copies_(num_replicas(layout_, table.world_size_)),
        wanted_(wanted) {}

  // `part`: what the ranks hold whose positions on the axes before `axis_index` are those of `rank`.
  void visit(size_t axis_index, const Box& part, int64_t rank) {
    if (axis_index == layout_.axes.size()) return add_pieces(part, rank);
    const LayoutAxis& axis = layout_.axes[axis_index];
    if (axis.only != -1) return visit(axis_index + 1, part, rank + axis.only * axis.stride);
    const auto dim = static_cast<size_t>(axis.dim);
    const Range chunks = intersecting_chunks(along(wanted_, dim), along(part, dim), axis.size);
    for (int64_t position = chunks.begin; position < chunks.end; ++position) {
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
    Range pieces{0, 1};
    if (split_.num_pieces > 1)
      pieces = intersecting_chunks(along(wanted_, 0), along(part, 0), split_.num_pieces);
    for (int64_t piece = pieces.begin; piece < pieces.end; ++piece) {
      const int64_t copy = (split_.first_writer + piece) % copies_;
      sources_.push_back({rank + rank_of_replica(layout_, table_.world_size_, copy),
                          piece_of(part, split_.num_pieces, piece)});
    }
  }

  const StateTable& table_;
  const TensorLayout& layout_;
  const Split& split_;
  const int64_t copies_;
  const Box& wanted_;
  std::vector<Source> sources_;
};

std::vector<Source> StateTable::sources_of(size_t tensor, const Box& wanted) const {
  TITAN_CHECK(tensor < tensors_.size(), "no tensor ", tensor, " of ", tensors_.size());
  const std::vector<int64_t>& shape = tensors_[tensor].shape;
  check_wanted(tensors_[tensor], wanted);
  if (wanted.numel() == 0) return {};
  Search search(*this, tensor, wanted);
  search.visit(0, {std::vector<int64_t>(shape.size(), 0), shape}, 0);
  return search.take();
}

}  // namespace titan::checkpoint
