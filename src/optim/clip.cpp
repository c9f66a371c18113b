#include "titan/optim/clip.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>
#include <vector>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "titan/core/error.h"

namespace titan::optim {

namespace {

// ---- sums of squares, in double: LibTorch's fp32 norm of a large CPU tensor is low by up to 8e-5

// Elements per task: few enough to balance threads, many enough to hide the cost of a task.
constexpr int64_t kChunk = 1 << 15;
constexpr int64_t kLanes = 16;  // independent sums, so that additions overlap and vectorize

// A part of a tensor.
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
    for (int64_t start = 0; start < tensor.numel(); start += kChunk)
      tasks.push_back({data + start, std::min(kChunk, tensor.numel() - start)});
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

// Groups tensors by device and dtype, in the order of each group's first tensor, so that the order of
// additions is fixed.
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

// For float dtypes on any device; on a GPU it waits for the result. On the CPU the order of additions depends
// only on the sizes, not on the number of threads.
double sum_of_squares(const std::vector<at::Tensor>& tensors) {
  double sum = 0;
  for (const auto& kind : by_kind(tensors)) {
    const bool on_cpu = kind.front().device().is_cpu();
    sum += on_cpu ? sum_of_kind_on_cpu(kind) : sum_on_device(kind).item<double>();
  }
  return sum;
}

// The same as a scalar on `device`, without waiting for it.
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

// ---- gradients by mesh

constexpr dist::Label kLabel{.phase = "optim::grad_norm"};

// The gradients of one mesh's parameters that count on this rank.
struct MeshGradients {
  DeviceMesh mesh;
  std::vector<at::Tensor> counted;
};

// Each element counts on one rank: if an axis replicates it, on the axis's first rank.
bool counts_here(const Parameter& parameter) {
  if (parameter.duplicate) return false;
  const DTensor& data = parameter.data;
  for (size_t axis = 0; axis < data.placements.size(); ++axis) {
    TITAN_CHECK(!data.placements[axis].is_partial(), "parameter '", parameter.name, "' is Partial on axis '",
                data.mesh.axes()[axis].name, "': its gradient has no norm before it is reduced");
    bool replicated = data.placements[axis].is_replicate();
    if (replicated && data.mesh.coordinate(data.mesh.axes()[axis].name) != 0) return false;
  }
  return true;
}

// Meshes in the order of their first parameter, which is the same on every rank. A parameter without a
// gradient counts too: other ranks may have its gradient.
std::vector<MeshGradients> by_mesh(const std::vector<Parameter>& parameters) {
  std::vector<MeshGradients> result;
  for (const auto& parameter : parameters) {
    auto found = std::find_if(result.begin(), result.end(),
                              [&](const MeshGradients& known) { return known.mesh == parameter.data.mesh; });
    if (found == result.end()) found = result.insert(found, {parameter.data.mesh, {}});
    const at::Tensor& grad = parameter.data.local.grad();
    if (grad.defined() && counts_here(parameter)) found->counted.push_back(grad);
  }
  return result;
}

// Every rank's value. They are gathered, not summed, so that all ranks add in the same order and see which
// rank's value isn't finite.
std::vector<double> value_of_each_rank(const DeviceMesh& mesh, double value) {
  if (mesh.size() == 1) return {value};
  at::Tensor mine = at::full({1}, value, at::dtype(at::kDouble));
  at::Tensor all = at::empty({mesh.size()}, mine.options());
  mesh.group()->all_gather(all, mine, kLabel).wait();
  return {all.const_data_ptr<double>(), all.const_data_ptr<double>() + all.numel()};
}

std::vector<at::Tensor> gradients_of(const std::vector<Parameter>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const Parameter& parameter : parameters)
    if (parameter.data.local.grad().defined()) gradients.push_back(parameter.data.local.grad());
  return gradients;
}

// The norm, from the squares of each rank, added in the order of ranks. Entries before `first_summed` only
// show which rank's value isn't finite, because the other entries include their sum.
GradNorm norm_of(const std::vector<int>& ranks, const double* squares, size_t first_summed) {
  GradNorm result;
  double sum = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i >= first_summed) sum += squares[i];
    if (!std::isfinite(squares[i]) && result.finite()) result.nonfinite_rank = ranks[i];
  }
  result.norm = std::sqrt(sum);
  return result;
}

// max_norm / (norm + epsilon), as in torch.nn.utils.
constexpr double kEpsilon = 1e-6;

void check_max_norm(double max_norm) {
  TITAN_CHECK(max_norm >= 0, "max_norm must be at least 0, got ", max_norm);
}

}  // namespace

GradNorm clip_grad_norm(const std::vector<Parameter>& parameters, double max_norm,
                        const DeviceMesh& pipeline) {
  check_max_norm(max_norm);
  at::NoGradGuard no_grad;
  std::vector<int> ranks;
  std::vector<double> squares;
  for (const auto& [mesh, counted] : by_mesh(parameters)) {
    const std::vector<double> of_ranks = value_of_each_rank(mesh, sum_of_squares(counted));
    squares.insert(squares.end(), of_ranks.begin(), of_ranks.end());
    ranks.insert(ranks.end(), mesh.ranks().begin(), mesh.ranks().end());
  }
  size_t first_summed = 0;
  if (pipeline.size() > 1) {
    first_summed = squares.size();
    const std::vector<double> of_stages =
        value_of_each_rank(pipeline, std::accumulate(squares.begin(), squares.end(), 0.0));
    squares.insert(squares.end(), of_stages.begin(), of_stages.end());
    ranks.insert(ranks.end(), pipeline.ranks().begin(), pipeline.ranks().end());
  }
  GradNorm result = norm_of(ranks, squares.data(), first_summed);
  if (!result.finite()) return result;
  result.factor = std::min(1.0, max_norm / (result.norm + kEpsilon));
  std::vector<at::Tensor> gradients = gradients_of(parameters);
  if (result.factor < 1 && !gradients.empty()) at::_foreach_mul_(gradients, result.factor);
  return result;
}

GradNorm LaunchedGradNorm::read(const double* host_squares) const {
  return norm_of(ranks, host_squares, first_summed);
}

LaunchedGradNorm launch_grad_norm(const std::vector<Parameter>& parameters, double max_norm,
                                  at::Device device, const DeviceMesh& pipeline) {
  check_max_norm(max_norm);
  at::NoGradGuard no_grad;
  LaunchedGradNorm result;
  std::vector<at::Tensor> squares;
  for (const auto& [mesh, counted] : by_mesh(parameters)) {
    const at::Tensor mine = sum_of_squares_on(device, counted).view({1});
    squares.push_back(mesh.size() == 1 ? mine : at::empty({mesh.size()}, mine.options()));
    if (mesh.size() > 1) mesh.group()->all_gather(squares.back(), mine, kLabel).wait();
    result.ranks.insert(result.ranks.end(), mesh.ranks().begin(), mesh.ranks().end());
  }
  // `squares` and `ranks` have the same length, even if a pipeline stage has no parameters.
  result.squares = squares.empty() ? at::empty({0}, at::dtype(at::kDouble).device(device)) : at::cat(squares);
  at::Tensor sum = result.squares.sum();
  if (pipeline.size() > 1) {
    at::Tensor of_stages = at::empty({pipeline.size()}, sum.options());
    pipeline.group()->all_gather(of_stages, sum.view({1}), kLabel).wait();
    result.first_summed = result.ranks.size();
    result.squares = at::cat({result.squares, of_stages});
    result.ranks.insert(result.ranks.end(), pipeline.ranks().begin(), pipeline.ranks().end());
    sum = of_stages.sum();
  }
  result.norm = sum.sqrt_();
  if (!std::isfinite(max_norm)) return result;
  const at::Tensor factor = result.norm.add(kEpsilon).reciprocal_().mul_(max_norm).clamp_max_(1.0);
  result.factor = at::where(result.norm.isfinite(), factor, at::ones_like(factor));
  return result;
}

}  // namespace titan::optim
