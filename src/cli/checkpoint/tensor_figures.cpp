#include "cli/checkpoint/tensor_figures.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include <ATen/ATen.h>
#include <ATen/ops/empty.h>

#include "titan/core/error.h"

namespace titan::cli {

at::Tensor read_slab(const checkpoint::SavedState& state, const std::string& name, const Box& box) {
  at::Tensor slab = at::empty(box.length, at::dtype(state.tensor(name).dtype));
  state.read(name, box, slab);
  return slab;
}

namespace {

double sum_of_squares(const at::Tensor& values) { return values.dot(values).item<double>(); }

at::ScalarType bits_of(at::ScalarType dtype) {
  switch (c10::elementSize(dtype)) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    default:
      return at::kLong;
  }
}

at::Tensor differing(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() == b.scalar_type()) {
    const at::ScalarType bits = bits_of(a.scalar_type());
    return a.view(bits).ne(b.view(bits)).flatten();
  }
  const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
  return x.ne(y).logical_and_(x.isnan().logical_and_(y.isnan()).logical_not_()).flatten();
}

std::vector<int64_t> index_in(const Box& box, int64_t position) {
  std::vector<int64_t> index(box.length.size());
  for (size_t dim = index.size(); dim-- > 0;) {
    index[dim] = box.offset[dim] + position % box.length[dim];
    position /= box.length[dim];
  }
  return index;
}

}  // namespace

double TensorStats::std() const {
  const int64_t count = num_elements - num_not_finite;
  return count > 0 ? std::sqrt(squares_about_mean_ / static_cast<double>(count)) : mean;
}

void TensorStats::add(const at::Tensor& slab) {
  at::Tensor values = slab.flatten().to(at::kDouble);
  const at::Tensor finite = values.isfinite();
  const int64_t count = finite.sum().item<int64_t>(), before = num_elements - num_not_finite;
  num_elements += values.numel();
  num_not_finite += values.numel() - count;
  if (count == 0) return;
  if (count < values.numel()) values = values.masked_select(finite);
  // Merges the means and the squares about them of two parts (Chan, Golub, LeVeque 1983).
  const double slab_mean = values.mean().item<double>(), all = static_cast<double>(before + count);
  const double distance = before == 0 ? 0 : slab_mean - mean;
  squares_about_mean_ += sum_of_squares(values - slab_mean) +
                         distance * distance * static_cast<double>(before) * static_cast<double>(count) / all;
  mean = before == 0 ? slab_mean : mean + distance * static_cast<double>(count) / all;
  min = std::fmin(min, values.min().item<double>());
  max = std::fmax(max, values.max().item<double>());
  norm = std::hypot(norm, std::sqrt(sum_of_squares(values)));
}

double TensorDifference::relative_norm() const {
  if (num_different == 0) return 0;
  return std::sqrt(squares_of_difference_) / std::sqrt(squares_of_a_);
}

void TensorDifference::add(const at::Tensor& a, const at::Tensor& b, const Box& box) {
  const at::Tensor x = a.flatten().to(at::kDouble);
  squares_of_a_ += sum_of_squares(x);
  num_elements += x.numel();
  const at::Tensor differs = differing(a, b);
  const int64_t count = differs.sum().item<int64_t>();
  if (count == 0) return;
  if (num_different == 0) first_index = index_in(box, differs.nonzero()[0].item<int64_t>());
  num_different += count;
  const at::Tensor difference = (x - b.flatten().to(at::kDouble)).masked_select(differs);
  squares_of_difference_ += sum_of_squares(difference);
  const double largest = difference.abs().max().item<double>();
  max_abs = std::isfinite(largest) ? std::max(max_abs, largest) : std::numeric_limits<double>::infinity();
}

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
      places += str("; only on ", axis.name, " ", axis.only);
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
  return text.empty() ? "no tensor is sharded" : text;
}

}  // namespace titan::cli
