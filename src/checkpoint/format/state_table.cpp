// Which rank holds which box of each tensor, and which rank writes it: the same table on every rank, without
// communication.

#include "titan/checkpoint/manifest.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/stored_files.h"
#include "core/utf8.h"
#include "titan/core/error.h"

namespace titan::checkpoint {

namespace {

constexpr size_t kMaxDims = 64;
// Keeps offsets and byte counts far from overflow, whatever is added to them.
constexpr int64_t kMaxElements = int64_t{1} << 56;

int64_t position_on(const LayoutAxis& axis, int64_t rank) { return rank / axis.stride % axis.size; }

std::string described(const LayoutAxis& axis) {
  return str("axis '", axis.name, "' (size ", axis.size, ", stride ", axis.stride, ")");
}

std::vector<const LayoutAxis*> fastest_first(const TensorLayout& layout) {
  std::vector<const LayoutAxis*> axes;
  for (const LayoutAxis& axis : layout.axes) axes.push_back(&axis);
  std::sort(axes.begin(), axes.end(), [](const auto* a, const auto* b) { return a->stride < b->stride; });
  return axes;
}

// Digits of a rank number that no axis uses. They number the copies of a part.
struct Gap {
  int64_t size = 1;
  int64_t stride = 1;
};

std::vector<Gap> gaps_fastest_first(const TensorLayout& layout, int64_t world_size) {
  std::vector<Gap> gaps;
  int64_t stride = 1;
  for (const LayoutAxis* axis : fastest_first(layout)) {
    if (axis->stride > stride) gaps.push_back({axis->stride / stride, stride});
    stride = axis->stride * axis->size;
  }
  if (world_size > stride) gaps.push_back({world_size / stride, stride});
  return gaps;
}

void check_shape(const std::vector<int64_t>& shape) {
  TITAN_CHECK(shape.size() <= kMaxDims, "a tensor of ", shape.size(), " dimensions; at most ", kMaxDims,
              " are allowed");
  int64_t numel = 1;
  for (int64_t size : shape) {
    TITAN_CHECK(size >= 0, "a shape of ", at::IntArrayRef(shape), ": sizes can't be negative");
    TITAN_CHECK(size <= kMaxElements / numel, "a shape of ", at::IntArrayRef(shape),
                ": more than 2^56 elements");
    numel *= std::max<int64_t>(size, 1);
  }
}

void check_axis(const LayoutAxis& axis, int64_t num_dims) {
  TITAN_CHECK(axis.size >= 2 && axis.stride >= 1, described(axis),
              ": size has to be 2 or more, stride 1 or more");
  TITAN_CHECK((axis.dim == -1) != (axis.only == -1), described(axis), ": dim ", axis.dim, " and only ",
              axis.only, "; exactly one of them is -1");
  TITAN_CHECK(axis.dim >= -1 && axis.dim < num_dims, described(axis), " splits dim ", axis.dim,
              "; the tensor has ", num_dims, " dimensions");
  TITAN_CHECK(axis.only >= -1 && axis.only < axis.size, described(axis), ": no position ", axis.only,
              " on it");
}

// A mesh axis in terms of rank numbers, with neither `dim` nor `only`.
LayoutAxis axis_of(const DeviceMesh& mesh, const MeshAxis& mesh_axis) {
  const DeviceMesh line = mesh[mesh_axis.name];
  const std::vector<int>& ranks = line.ranks();
  LayoutAxis axis{.name = mesh_axis.name, .size = mesh_axis.size, .stride = ranks[1] - ranks[0]};
  for (size_t i = 0; i < ranks.size(); ++i)
    TITAN_CHECK(ranks[i] == ranks[0] + static_cast<int64_t>(i) * axis.stride, "mesh axis '", axis.name,
                "': rank ", ranks[i], " at position ", i, " isn't ", i, " steps of ", axis.stride,
                " from rank ", ranks[0], ", so no layout describes tensors that it splits");
  TITAN_CHECK(position_on(axis, ranks[line.rank()]) == line.rank(), "mesh axis '", axis.name, "' (size ",
              axis.size, ", stride ", axis.stride, "): rank ", ranks[line.rank()], " is at position ",
              line.rank(), " on it, which doesn't follow from its number");
  return axis;
}

int64_t this_rank(const DeviceMesh& mesh) { return mesh.ranks()[static_cast<size_t>(mesh.rank())]; }

// Positions of the mesh's axes, in the order in which they split.
std::vector<int> cutting_order(const DTensor& tensor) {
  std::vector<int> every(static_cast<size_t>(tensor.mesh.num_axes()));
  std::iota(every.begin(), every.end(), 0);
  if (tensor.cut_order.empty()) return every;
  TITAN_CHECK(
      std::is_permutation(every.begin(), every.end(), tensor.cut_order.begin(), tensor.cut_order.end()),
      "a cut order that isn't a permutation of the mesh's ", every.size(), " axes");
  return tensor.cut_order;
}

void add_cuts(const DTensor& tensor, TensorLayout& layout) {
  const auto& axes = tensor.mesh.axes();
  TITAN_CHECK(tensor.placements.size() == axes.size(), "a tensor with ", tensor.placements.size(),
              " placements on a mesh of ", axes.size(), " axes");
  for (int position : cutting_order(tensor)) {
    const MeshAxis& axis = axes[static_cast<size_t>(position)];
    const Placement& placement = tensor.placements[static_cast<size_t>(position)];
    TITAN_CHECK(!placement.is_partial(), "a tensor that is Partial on mesh axis '", axis.name,
                "' has no values yet; redistribute it first");
    if (!placement.is_shard() || axis.size == 1) continue;
    layout.axes.push_back(axis_of(tensor.mesh, axis));
    layout.axes.back().dim = placement.dim;
    check_axis(layout.axes.back(), static_cast<int64_t>(tensor.global_shape.size()));
  }
}

// [Note: which rank writes what] A part that several ranks hold is cut into about as many pieces as it has
// MiB, at most one per copy and one per row. The pieces are dealt to the copies of a layout's parts in turn,
// the largest first: then no two copies differ by more than one piece in what they write. All parts of a
// tensor are dealt like its first part, which is the largest.

constexpr int64_t kPieceBytes = int64_t{1} << 20;
// Keeps sums of the sizes that a file claims from overflowing.
constexpr int64_t kMaxBytes = int64_t{1} << 62;
constexpr size_t kMaxNameBytes = 1000;
constexpr std::string_view kMetadataKey = "__metadata__";  // reserved in safetensors headers

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

// One tensor's size can't overflow (check_layout).
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

// ---- cutting

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};

// The range of the `parts` chunks of `whole` that have elements of `wanted`.
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

// The number of pieces of each part. Where rows don't divide evenly, fewer pieces may do.
int64_t num_pieces_of(const Box& largest_part, int64_t num_bytes, int64_t num_replicas) {
  if (largest_part.length.empty() || num_bytes == 0) return 1;
  const int64_t rows = largest_part.length[0];
  const int64_t pieces = std::clamp<int64_t>(num_bytes / kPieceBytes, 1, std::min(num_replicas, rows));
  const int64_t rows_each = padded_chunk_length(rows, pieces);
  return (rows + rows_each - 1) / rows_each;
}

}  // namespace

TensorLayout layout_of(const DTensor& tensor, const DeviceMesh& pipeline) {
  TITAN_CHECK(pipeline.num_axes() <= 1, "a pipeline has one axis, not ", pipeline.num_axes());
  check_shape(tensor.global_shape);
  TensorLayout layout;
  if (pipeline.size() > 1) {
    layout.axes.push_back(axis_of(pipeline, pipeline.axes()[0]));
    layout.axes.back().only = pipeline.rank();
  }
  add_cuts(tensor, layout);
  const int64_t rank = this_rank(tensor.mesh.num_axes() > 0 ? tensor.mesh : pipeline);
  const Box box = box_of(layout, tensor.global_shape, rank);
  TITAN_CHECK(box == tensor.box, "rank ", rank, "'s part of a tensor of ",
              at::IntArrayRef(tensor.global_shape), " begins at ", at::IntArrayRef(tensor.box.offset),
              " and has sizes ", at::IntArrayRef(tensor.box.length), "; its placements say ",
              at::IntArrayRef(box.offset), " and ", at::IntArrayRef(box.length));
  return layout;
}

void check_layout(const TensorLayout& layout, const std::vector<int64_t>& shape, int64_t world_size) {
  TITAN_CHECK(world_size >= 1, "a world of ", world_size, " ranks");
  check_shape(shape);
  for (const LayoutAxis& axis : layout.axes) check_axis(axis, static_cast<int64_t>(shape.size()));
  // From the fastest digit up: each begins at or above the end of the one below, and the last one's end
  // divides the world size. So every combination of positions on the axes occurs with every combination of
  // the digits between.
  int64_t below = 1;
  for (const LayoutAxis* axis : fastest_first(layout)) {
    TITAN_CHECK(axis->stride % below == 0, described(*axis),
                " isn't independent of a faster axis: its stride isn't a multiple of ", below);
    TITAN_CHECK(axis->stride <= world_size / axis->size, described(*axis), " needs more than ", world_size,
                " ranks");
    below = axis->stride * axis->size;
  }
  TITAN_CHECK(world_size % below == 0, "axes that repeat every ", below, " ranks can't divide ", world_size,
              " ranks");
}

bool holds(const TensorLayout& layout, int64_t rank) {
  return std::all_of(layout.axes.begin(), layout.axes.end(), [&](const LayoutAxis& axis) {
    return axis.only == -1 || axis.only == position_on(axis, rank);
  });
}

Box box_of(const TensorLayout& layout, const std::vector<int64_t>& shape, int64_t rank) {
  Box box{std::vector<int64_t>(shape.size(), 0), shape};
  for (const LayoutAxis& axis : layout.axes) {
    if (axis.dim == -1) continue;
    const auto dim = static_cast<size_t>(axis.dim);
    const Chunk chunk = chunk_of(box.length[dim], axis.size, position_on(axis, rank));
    box.offset[dim] += chunk.offset;
    box.length[dim] = chunk.length;
  }
  return box;
}

int64_t num_replicas(const TensorLayout& layout, int64_t world_size) {
  for (const LayoutAxis& axis : layout.axes) world_size /= axis.size;
  return world_size;
}

int64_t replica_of(const TensorLayout& layout, int64_t world_size, int64_t rank) {
  const std::vector<Gap> gaps = gaps_fastest_first(layout, world_size);
  int64_t replica = 0;
  for (auto gap = gaps.rbegin(); gap != gaps.rend(); ++gap)
    replica = replica * gap->size + rank / gap->stride % gap->size;
  return replica;
}

int64_t rank_of_replica(const TensorLayout& layout, int64_t world_size, int64_t replica) {
  int64_t rank = 0;
  for (const Gap& gap : gaps_fastest_first(layout, world_size)) {
    rank += replica % gap.size * gap.stride;
    replica /= gap.size;
  }
  return rank;
}

// ---- the table

std::string detail::name_problem(std::string_view name) {
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  if (name.empty()) return "is empty";
  if (name.size() > kMaxNameBytes)
    return str("has ", name.size(), " bytes; at most ", kMaxNameBytes, " are allowed");
  // Checked before the name is shown.
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

std::vector<Source> StateTable::sources_of(size_t tensor, const Box& wanted) const {
  TITAN_CHECK(tensor < tensors_.size(), "no tensor ", tensor, " of ", tensors_.size());
  const std::vector<int64_t>& shape = tensors_[tensor].shape;
  TITAN_CHECK(titan::detail::is_inside(wanted, shape), "tensor '", tensors_[tensor].name,
              "': the wanted box isn't inside the tensor");
  if (wanted.numel() == 0) return {};
  const TensorLayout& layout = *tensors_[tensor].layout;
  const int64_t num_pieces = splits_[tensor].num_pieces, first_writer = splits_[tensor].first_writer;
  std::vector<Source> sources;
  const auto add_pieces = [&](const Box& part, int64_t rank) {
    const Range pieces =
        num_pieces > 1 ? intersecting_chunks(along(wanted, 0), along(part, 0), num_pieces) : Range{0, 1};
    for (int64_t piece = pieces.begin; piece < pieces.end; ++piece) {
      const int64_t copy = (first_writer + piece) % num_replicas(layout, world_size_);
      sources.push_back(
          {rank + rank_of_replica(layout, world_size_, copy), piece_of(part, num_pieces, piece)});
    }
  };
  // Visits only the positions whose parts intersect the wanted box. `part` is held by the ranks that share
  // the positions of `rank` on the axes before `axis_index`.
  const std::function<void(size_t, const Box&, int64_t)> visit = [&](size_t axis_index, const Box& part,
                                                                     int64_t rank) {
    if (axis_index == layout.axes.size()) return add_pieces(part, rank);
    const LayoutAxis& axis = layout.axes[axis_index];
    if (axis.only != -1) return visit(axis_index + 1, part, rank + axis.only * axis.stride);
    const auto dim = static_cast<size_t>(axis.dim);
    const Range chunks = intersecting_chunks(along(wanted, dim), along(part, dim), axis.size);
    for (int64_t position = chunks.begin; position < chunks.end; ++position) {
      Box smaller = part;
      cut(smaller, dim, axis.size, position);
      visit(axis_index + 1, smaller, rank + position * axis.stride);
    }
  };
  visit(0, {std::vector<int64_t>(shape.size(), 0), shape}, 0);
  std::sort(sources.begin(), sources.end(), [](const Source& a, const Source& b) { return a.rank < b.rank; });
  return sources;
}

}  // namespace titan::checkpoint
