#include "titan/tensor/dtensor.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include "titan/core/error.h"

namespace titan {

namespace {

using Placements = std::vector<Placement>;

constexpr dist::Label kGatherLabel{.phase = "tensor::gather"};
constexpr dist::Label kReduceLabel{.phase = "tensor::reduce"};

// ---- assembling a tensor from its parts on several ranks

// Parts of one tensor: the box of each, and their elements one part after the other.
struct Parts {
  std::vector<Box> boxes;
  at::Tensor flat;
};

int64_t total_numel(const Box* first, size_t count) {
  int64_t numel = 0;
  for (size_t i = 0; i < count; ++i) numel += first[i].numel();
  return numel;
}

// A table whose rows are the boxes' offsets and lengths.
at::Tensor table_of(const std::vector<Box>& boxes) {
  int64_t num_dims = static_cast<int64_t>(boxes.front().offset.size());
  at::Tensor table = at::empty({static_cast<int64_t>(boxes.size()), 2 * num_dims}, at::dtype(at::kLong));
  int64_t* cell = table.mutable_data_ptr<int64_t>();
  for (const Box& box : boxes) {
    cell = std::copy(box.offset.begin(), box.offset.end(), cell);
    cell = std::copy(box.length.begin(), box.length.end(), cell);
  }
  return table;
}

std::vector<Box> boxes_of(const at::Tensor& table) {
  at::Tensor host = table.to(at::kCPU);
  const int64_t* cell = host.const_data_ptr<int64_t>();
  int64_t num_dims = host.size(1) / 2;
  std::vector<Box> boxes;
  for (int64_t row = 0; row < host.size(0); ++row, cell += 2 * num_dims) {
    boxes.push_back({{cell, cell + num_dims}, {cell + num_dims, cell + 2 * num_dims}});
  }
  return boxes;
}

std::vector<Box> gather_boxes(dist::Group& group, const std::vector<Box>& boxes, at::Device device) {
  at::Tensor mine = table_of(boxes).to(device);
  at::Tensor all = at::empty({group.size() * mine.size(0), mine.size(1)}, mine.options());
  group.all_gather(all, mine, kGatherLabel).wait();
  return boxes_of(all);
}

// All ranks have the same number of parts but not of elements, so buffers are padded to the longest rank's.
Parts gather_parts(dist::Group& group, const Parts& mine) {
  size_t parts_per_rank = mine.boxes.size();
  Parts all{gather_boxes(group, mine.boxes, mine.flat.device()), {}};
  std::vector<int64_t> numels;
  for (int rank = 0; rank < group.size(); ++rank) {
    numels.push_back(total_numel(&all.boxes[rank * parts_per_rank], parts_per_rank));
  }
  int64_t longest = *std::max_element(numels.begin(), numels.end());
  all.flat = at::empty({total_numel(all.boxes.data(), all.boxes.size())}, mine.flat.options());
  if (longest == 0) return all;

  at::Tensor send = at::empty({longest}, mine.flat.options());
  send.narrow(0, 0, mine.flat.numel()).copy_(mine.flat);
  at::Tensor received = at::empty({group.size(), longest}, mine.flat.options());
  // Every dtype is sent as bytes: some backends don't support bool or the 8-bit floats.
  group.all_gather(received.view(-1).view(at::kByte), send.view(at::kByte), kGatherLabel).wait();
  int64_t position = 0;
  for (int rank = 0; rank < group.size(); position += numels[rank++]) {
    all.flat.narrow(0, position, numels[rank]).copy_(received[rank].narrow(0, 0, numels[rank]));
  }
  return all;
}

// The smallest box that contains all of `boxes`. Empty boxes are at the end of the split dimension, so they
// need no special case.
Box cover(const std::vector<Box>& boxes) {
  Box whole = boxes.front();
  for (const Box& box : boxes) {
    for (size_t dim = 0; dim < box.offset.size(); ++dim) {
      int64_t end = std::max(whole.offset[dim] + whole.length[dim], box.offset[dim] + box.length[dim]);
      whole.offset[dim] = std::min(whole.offset[dim], box.offset[dim]);
      whole.length[dim] = end - whole.offset[dim];
    }
  }
  return whole;
}

at::Tensor assemble(const Parts& parts, const Box& whole) {
  at::Tensor result = at::empty(whole.length, parts.flat.options());
  int64_t position = 0;
  for (const Box& box : parts.boxes) {
    int64_t numel = box.numel();
    if (numel == 0) continue;
    at::Tensor target = result;
    for (size_t dim = 0; dim < box.offset.size(); ++dim) {
      target = target.narrow(static_cast<int64_t>(dim), box.offset[dim] - whole.offset[dim], box.length[dim]);
    }
    target.copy_(parts.flat.narrow(0, position, numel).view(box.length));
    position += numel;
  }
  return result;
}

// Gathers the parts of `tensor` along the mesh axes `axes` on each of their ranks. These axes become
// Replicate, and the box grows to the union of the parts, which must be a box. Blocking; collective over the
// axes. The parts' boxes are exchanged, too, so that parts that don't follow local_box's rule (a
// tensor-parallel part that fully_shard split again) can be gathered.
DTensor gather_axes(const DTensor& tensor, const std::vector<size_t>& axes) {
  DTensor result = tensor;
  Parts parts{{tensor.box}, tensor.local.reshape(-1)};
  for (size_t axis : axes) {
    result.placements[axis] = Placement::replicate();
    const MeshAxis& mesh_axis = tensor.mesh.axes()[axis];
    if (mesh_axis.size > 1) parts = gather_parts(*tensor.mesh.group(mesh_axis.name), parts);
  }
  if (parts.boxes.size() == 1) return result;
  result.box = cover(parts.boxes);
  bool fake = tensor.mesh.world().backend() == "fake";  // its peers echo this rank's part
  int64_t numel = total_numel(parts.boxes.data(), parts.boxes.size());
  TITAN_INTERNAL_ASSERT(fake || numel == result.box.numel(), "parts of ", numel, " elements cover a box of ",
                        result.box.numel());
  result.local = assemble(parts, result.box);
  return result;
}

// ---- changing placements

// The mesh axes that shard `dim`, from left to right.
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

// The chunks of `local` along `dim`, each padded to the longest one: [parts, ...].
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

// A dimension that one axis shards can be sharded further by axes to its right without communication. A
// dimension that several axes shard may not follow local_box's rule (see gather_axes), so any change gathers
// it. All ranks decide the same.
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
  // Copied, so that the whole can be freed.
  if (local.sizes() != tensor.local.sizes()) tensor.local = local.clone(at::MemoryFormat::Contiguous);
  tensor.placements = target;
}

}  // namespace

int64_t DTensor::global_numel() const { return c10::multiply_integers(global_shape); }

Box local_box(const std::vector<int64_t>& global_shape, const DeviceMesh& mesh, const Placements& placements,
              const std::vector<int>& cut_order) {
  const auto& axes = mesh.axes();
  TITAN_CHECK(placements.size() == axes.size(), "expected a placement for each of the mesh's ", axes.size(),
              " axes, got ", placements.size());
  TITAN_CHECK(cut_order.empty() || cut_order.size() == axes.size(), "a cut order of ", cut_order.size(),
              " axes for a mesh of ", axes.size());
  Box box{std::vector<int64_t>(global_shape.size(), 0), global_shape};
  for (size_t position = 0; position < axes.size(); ++position) {
    const size_t axis = cut_order.empty() ? position : static_cast<size_t>(cut_order[position]);
    if (!placements[axis].is_shard()) continue;
    int64_t dim = placements[axis].dim;
    TITAN_CHECK(dim >= 0 && dim < static_cast<int64_t>(global_shape.size()), placements[axis], " on axis '",
                axes[axis].name, "': the tensor has ", global_shape.size(), " dimensions");
    Chunk chunk = chunk_of(box.length[dim], axes[axis].size, mesh.coordinate(axes[axis].name));
    box.offset[dim] += chunk.offset;
    box.length[dim] = chunk.length;
  }
  return box;
}

DTensor distribute(const at::Tensor& whole, const DeviceMesh& mesh, Placements placements) {
  for (const auto& placement : placements) {
    TITAN_CHECK(!placement.is_partial(), "a whole tensor can't be distributed as Partial");
  }
  DTensor result{.local = whole,
                 .mesh = mesh,
                 .placements = Placements(placements.size(), Placement::replicate()),
                 .global_shape = whole.sizes().vec(),
                 .box = {std::vector<int64_t>(whole.dim(), 0), whole.sizes().vec()}};
  return redistribute(result, std::move(placements));
}

at::Tensor full_tensor(const DTensor& tensor) {
  return redistribute(tensor, Placements(tensor.placements.size(), Placement::replicate())).local;
}

// [Note: redistribute]
// Three moves, in this order: sum Partial axes (directly into a Shard if that is the target), gather the
// dimensions whose sharding changes, and cut the local tensor to its new part, which needs no communication.
DTensor redistribute(const DTensor& tensor, Placements target) {
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
  if (!axes.empty()) result = gather_axes(result, axes);
  // A tensor that is sharded anew follows local_box's rule.
  if (tensor.placements != target) result.cut_order.clear();
  cut(result, target);
  return result;
}

}  // namespace titan
