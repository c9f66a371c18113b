#include "titan/tensor/dtensor.h"

#include "titan/core/error.h"

namespace titan {

int64_t DTensor::global_numel() const {
  int64_t numel = 1;
  for (int64_t size : global_shape) numel *= size;
  return numel;
}

Box local_box(const std::vector<int64_t>& global_shape, const DeviceMesh& mesh,
              const std::vector<Placement>& placements, const std::vector<int>& cut_order) {
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

DTensor distribute(const at::Tensor& whole, const DeviceMesh& mesh, std::vector<Placement> placements) {
  for (const auto& placement : placements) {
    TITAN_CHECK(!placement.is_partial(), "a whole tensor can't be distributed as Partial");
  }
  DTensor result{.local = whole,
                 .mesh = mesh,
                 .placements = std::vector<Placement>(placements.size(), Placement::replicate()),
                 .global_shape = whole.sizes().vec(),
                 .box = {std::vector<int64_t>(whole.dim(), 0), whole.sizes().vec()}};
  return redistribute(result, std::move(placements));
}

at::Tensor full_tensor(const DTensor& tensor) {
  return redistribute(tensor, std::vector<Placement>(tensor.placements.size(), Placement::replicate())).local;
}

}  // namespace titan
