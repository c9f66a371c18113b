#include "sum_of_squares.h"

#include <algorithm>
#include <array>
#include <bit>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

namespace titan::optim {
namespace {

constexpr int64_t kChunk =
    1 << 15;  // elements of one task: small enough to balance, large enough to hide its cost
constexpr int64_t kLanes = 16;  // independent sums, so that additions overlap and vectorize

// Part of a tensor.
struct Task {
  const void* data;
  int64_t numel;
};

inline double widened(float value) { return value; }
inline double widened(double value) { return value; }
inline double widened(c10::BFloat16 value) { return std::bit_cast<float>(uint32_t{value.x} << 16); }
inline double widened(c10::Half value) { return static_cast<float>(value); }

template <class T>
double sum_squares(const T* data, int64_t numel) {
  std::array<double, kLanes> lanes{};
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      double value = widened(data[i + lane]);
      lanes[lane] += value * value;
    }
  }
  for (int64_t lane = 0; i < numel; ++i, ++lane) lanes[lane] += widened(data[i]) * widened(data[i]);
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

template <class T>
std::vector<Task> tasks_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Task> tasks;
  for (const auto& tensor : tensors) {
    const T* data = tensor.const_data_ptr<T>();
    for (int64_t start = 0; start < tensor.numel(); start += kChunk) {
      tasks.push_back({data + start, std::min(kChunk, tensor.numel() - start)});
    }
  }
  return tasks;
}

template <class T>
double sum_on_cpu(const std::vector<at::Tensor>& tensors) {
  std::vector<Task> tasks = tasks_of<T>(tensors);
  std::vector<double> sums(tasks.size());
  at::parallel_for(0, static_cast<int64_t>(tasks.size()), /*grain_size=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      sums[i] = sum_squares(static_cast<const T*>(tasks[i].data), tasks[i].numel);
  });
  double sum = 0;
  for (double part : sums) sum += part;
  return sum;
}

at::Tensor sum_on_device(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> norms = at::_foreach_norm(tensors, 2, at::kDouble);
  return at::stack(norms).square_().sum();
}

double sum_of_kind_on_cpu(const std::vector<at::Tensor>& tensors) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, tensors.front().scalar_type(),
                                         "sum_of_squares", [&] { return sum_on_cpu<scalar_t>(tensors); });
}

// Kinds in the order of their first tensor, so that the order of additions is fixed.
std::vector<std::vector<at::Tensor>> by_kind(const std::vector<at::Tensor>& tensors) {
  std::vector<std::vector<at::Tensor>> kinds;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    auto same_kind = [&](const std::vector<at::Tensor>& kind) {
      return kind.front().scalar_type() == tensor.scalar_type() && kind.front().device() == tensor.device();
    };
    auto found = std::find_if(kinds.begin(), kinds.end(), same_kind);
    if (found == kinds.end()) found = kinds.insert(kinds.end(), std::vector<at::Tensor>{});
    found->push_back(tensor.is_contiguous() ? tensor : tensor.contiguous());
  }
  return kinds;
}

}  // namespace

double sum_of_squares(const std::vector<at::Tensor>& tensors) {
  double sum = 0;
  for (const auto& kind : by_kind(tensors)) {
    const bool on_cpu = kind.front().device().is_cpu();
    sum += on_cpu ? sum_of_kind_on_cpu(kind) : sum_on_device(kind).item<double>();
  }
  return sum;
}

at::Tensor sum_of_squares_on(at::Device device, const std::vector<at::Tensor>& tensors) {
  at::Tensor sum = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device));
  for (const auto& kind : by_kind(tensors)) {
    if (kind.front().device().is_cpu()) {
      sum.add_(sum_of_kind_on_cpu(kind));
    } else {
      sum.add_(sum_on_device(kind));
    }
  }
  return sum;
}

}  // namespace titan::optim
