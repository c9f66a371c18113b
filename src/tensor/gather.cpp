#include "gather.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "titan/core/error.h"

namespace titan::detail {
namespace {

constexpr dist::Label kLabel{.phase = "tensor::gather"};

// Parts of one tensor: where each lies, and their elements one part after the other.
struct Parts {
  std::vector<Box> boxes;
  at::Tensor flat;
};

int64_t total_numel(const Box* first, size_t count) {
  int64_t numel = 0;
  for (size_t i = 0; i < count; ++i) numel += first[i].numel();
  return numel;
}

// Boxes as rows of offsets and lengths.
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
  group.all_gather(all, mine, kLabel).wait();
  return boxes_of(all);
}

// Every rank holds the same number of parts, but not of elements: the buffers are padded to the longest
// rank's.
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
  // Bytes travel for every dtype; not every backend knows bool or the 8-bit floats.
  group.all_gather(received.view(-1).view(at::kByte), send.view(at::kByte), kLabel).wait();
  int64_t position = 0;
  for (int rank = 0; rank < group.size(); position += numels[rank++]) {
    all.flat.narrow(0, position, numels[rank]).copy_(received[rank].narrow(0, 0, numels[rank]));
  }
  return all;
}

// The smallest box that holds all of `boxes`; empty ones lie at the end of what was split, so they count like
// the others.
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

}  // namespace

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

}  // namespace titan::detail
