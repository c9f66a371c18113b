#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "gather.h"
#include "titan/core/error.h"
#include "titan/tensor/dtensor.h"

// [Note: redistribute]
// Three moves, in this order: sum what is Partial (straight into its Shard where that is wanted), gather the
// dimensions whose split changes, cut the local tensor to its new part, which needs no communication.

namespace titan {
namespace {

using Placements = std::vector<Placement>;

constexpr dist::Label kReduceLabel{.phase = "tensor::reduce"};

// Which mesh axes split `dim`, from left to right.
std::vector<size_t> axes_sharding(const Placements& placements, int64_t dim) {
  std::vector<size_t> axes;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis] == Placement::shard(dim)) axes.push_back(axis);
  }
  return axes;
}

void check_target(const DTensor& tensor, const Placements& target) {
  TITAN_CHECK(tensor.placements.size() == tensor.mesh.axes().size(), "a tensor on ",
              tensor.mesh.axes().size(), " mesh axes has ", tensor.placements.size(), " placements");
  TITAN_CHECK(target.size() == tensor.placements.size(), "expected ", tensor.placements.size(),
              " placements, got ", target.size());
  for (size_t axis = 0; axis < target.size(); ++axis) {
    TITAN_CHECK(!target[axis].is_partial() || tensor.placements[axis].is_partial(), "axis '",
                tensor.mesh.axes()[axis].name, "': ", tensor.placements[axis], " can't become Partial");
    TITAN_CHECK(!target[axis].is_shard() || (target[axis].dim >= 0 && target[axis].dim < tensor.local.dim()),
                target[axis], " of a tensor with ", tensor.local.dim(), " dimensions");
  }
}

void all_reduce_axis(DTensor& tensor, size_t axis) {
  const MeshAxis& mesh_axis = tensor.mesh.axes()[axis];
  tensor.placements[axis] = Placement::replicate();
  if (mesh_axis.size == 1 || tensor.local.numel() == 0) return;
  tensor.local = tensor.local.clone(at::MemoryFormat::Contiguous);
  tensor.mesh.group(mesh_axis.name)->all_reduce(tensor.local, dist::ReduceOp::Sum, kReduceLabel).wait();
}

// The chunks of `local` along `dim`, each padded to the longest: [parts, ...].
at::Tensor padded_chunks(const at::Tensor& local, int64_t dim, int64_t parts) {
  std::vector<int64_t> shape = local.sizes().vec();
  shape[dim] = padded_chunk_length(local.size(dim), parts);
  shape.insert(shape.begin(), parts);
  at::Tensor chunks = at::zeros(shape, local.options());
  for (int64_t part = 0; part < parts; ++part) {
    Chunk chunk = chunk_of(local.size(dim), parts, part);
    chunks[part].narrow(dim, 0, chunk.length).copy_(local.narrow(dim, chunk.offset, chunk.length));
  }
  return chunks;
}

void reduce_scatter_axis(DTensor& tensor, size_t axis, int64_t dim) {
  const MeshAxis& mesh_axis = tensor.mesh.axes()[axis];
  tensor.placements[axis] = Placement::shard(dim);
  if (mesh_axis.size == 1) return;
  at::Tensor chunks = padded_chunks(tensor.local, dim, mesh_axis.size);
  at::Tensor mine = at::empty(chunks.sizes().slice(1), chunks.options());
  if (chunks.numel() > 0) {
    tensor.mesh.group(mesh_axis.name)->reduce_scatter(mine.view(-1), chunks.view(-1), kReduceLabel).wait();
  }
  Chunk chunk = chunk_of(tensor.local.size(dim), mesh_axis.size, tensor.mesh.coordinate(mesh_axis.name));
  tensor.local = mine.narrow(dim, 0, chunk.length).contiguous();
  tensor.box.offset[dim] += chunk.offset;
  tensor.box.length[dim] = chunk.length;
}

void reduce_partial(DTensor& tensor, const Placements& target) {
  for (size_t axis = 0; axis < target.size(); ++axis) {
    if (!tensor.placements[axis].is_partial() || target[axis].is_partial()) continue;
    bool sole_split = target[axis].is_shard() && axes_sharding(tensor.placements, target[axis].dim).empty() &&
                      axes_sharding(target, target[axis].dim).size() == 1;
    if (sole_split) {
      reduce_scatter_axis(tensor, axis, target[axis].dim);
    } else {
      all_reduce_axis(tensor, axis);
    }
  }
}

// A dimension split by one axis can be split further by axes to its right without communication. One that is
// split by several may not follow local_box's rule (see gather_axes), so any change gathers it. Every rank
// decides alike.
bool must_gather(const std::vector<size_t>& before, const std::vector<size_t>& after) {
  if (before.empty() || before == after) return false;
  return before.size() > 1 || after.empty() || after.front() != before.front();
}

void cut(DTensor& tensor, const Placements& target) {
  Box box = local_box(tensor.global_shape, tensor.mesh, target);
  at::Tensor local = tensor.local;
  for (int64_t dim = 0; dim < local.dim(); ++dim) {
    if (axes_sharding(tensor.placements, dim) == axes_sharding(target, dim)) continue;
    local = local.narrow(dim, box.offset[dim] - tensor.box.offset[dim], box.length[dim]);
    tensor.box.offset[dim] = box.offset[dim];
    tensor.box.length[dim] = box.length[dim];
  }
  // A part of its own, so that the whole can be freed.
  if (local.sizes() != tensor.local.sizes()) tensor.local = local.clone(at::MemoryFormat::Contiguous);
  tensor.placements = target;
}

}  // namespace

DTensor redistribute(const DTensor& tensor, std::vector<Placement> target) {
  check_target(tensor, target);
  at::NoGradGuard no_grad;
  DTensor result = tensor;
  result.local = tensor.local.detach();
  reduce_partial(result, target);
  std::vector<size_t> axes;
  for (int64_t dim = 0; dim < tensor.local.dim(); ++dim) {
    auto before = axes_sharding(result.placements, dim);
    if (must_gather(before, axes_sharding(target, dim)))
      axes.insert(axes.end(), before.begin(), before.end());
  }
  if (!axes.empty()) result = detail::gather_axes(result, axes);
  // What is split anew follows local_box's rule.
  if (tensor.placements != target) result.cut_order.clear();
  cut(result, target);
  return result;
}

}  // namespace titan
