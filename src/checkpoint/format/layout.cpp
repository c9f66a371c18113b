#include <algorithm>
#include <numeric>

#include "titan/checkpoint/manifest.h"
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

std::string described(const std::vector<int64_t>& numbers) {
  std::string text;
  for (int64_t number : numbers) text += str(text.empty() ? "" : ", ", number);
  return "[" + text + "]";
}

std::vector<const LayoutAxis*> fastest_first(const TensorLayout& layout) {
  std::vector<const LayoutAxis*> axes;
  for (const LayoutAxis& axis : layout.axes) axes.push_back(&axis);
  std::sort(axes.begin(), axes.end(), [](const auto* a, const auto* b) { return a->stride < b->stride; });
  return axes;
}

// Digits of the rank numbers that belong to no axis: they tell the copies of a part apart.
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
    TITAN_CHECK(size >= 0, "a shape of ", described(shape), ": sizes can't be negative");
    TITAN_CHECK(size <= kMaxElements / numel, "a shape of ", described(shape), ": more than 2^56 elements");
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

// The axis of a mesh by the ranks' numbers, with neither `dim` nor `only`.
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

// Positions of the mesh's axes, the one that splits first in front.
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
  TITAN_CHECK(box == tensor.box, "rank ", rank, "'s part of a tensor of ", described(tensor.global_shape),
              " begins at ", described(tensor.box.offset), " and has sizes ", described(tensor.box.length),
              "; its placements say ", described(box.offset), " and ", described(box.length));
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
                " isn't independent of a faster axis: its stride is no multiple of ", below);
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

}  // namespace titan::checkpoint
