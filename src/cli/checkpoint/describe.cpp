#include "cli/checkpoint/describe.h"

#include <set>
#include <tuple>

#include "titan/core/error.h"

namespace titan::cli {

using namespace checkpoint;

std::string dtype_text(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return "float64";
    case at::kFloat:
      return "float32";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    default:
      return c10::toString(dtype);
  }
}

int64_t num_elements(const StateTensor& tensor) {
  int64_t elements = 1;
  for (int64_t length : tensor.shape) elements *= length;
  return elements;
}

int64_t num_bytes(const StateTensor& tensor) {
  return num_elements(tensor) * static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

std::string layout_text(const StateTensor& tensor, int64_t world_size) {
  std::string cuts, places;
  for (const LayoutAxis& axis : tensor.layout->axes) {
    if (axis.only >= 0)
      places += str("; on ", axis.name, " ", axis.only, " alone");
    else if (axis.size > 1)
      cuts += str(cuts.empty() ? "" : ", ", "dim ", axis.dim, " by ", axis.name, " ", axis.size);
  }
  const int64_t copies = num_replicas(*tensor.layout, world_size);
  return str(cuts.empty() ? "whole" : cuts, places, copies > 1 ? str("; ", copies, " copies") : "");
}

std::string mesh_text(const StateTable& table) {
  std::set<std::tuple<int64_t, std::string, int64_t>> axes;
  for (const StateTensor& tensor : table.tensors())
    for (const LayoutAxis& axis : tensor.layout->axes)
      if (axis.size > 1) axes.emplace(-axis.stride, axis.name, axis.size);
  std::string text;
  for (const auto& [stride, name, size] : axes) text += str(text.empty() ? "" : ", ", name, " ", size);
  return text.empty() ? "no tensor is cut" : text;
}

}  // namespace titan::cli
