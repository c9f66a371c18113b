#include "titan/optim/clip.h"

#include <algorithm>
#include <cmath>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "sum_of_squares.h"
#include "titan/core/error.h"

namespace titan::optim {
namespace {

constexpr dist::Label kLabel{.phase = "optim::grad_norm"};

// The gradients of one mesh's parameters that count on this rank.
struct MeshGradients {
  DeviceMesh mesh;
  std::vector<at::Tensor> counted;
};

// Each element is to be counted on one rank: of an axis over which it is replicated, on that axis's first.
bool counts_here(const Parameter& parameter) {
  const DTensor& data = parameter.data;
  for (size_t axis = 0; axis < data.placements.size(); ++axis) {
    TITAN_CHECK(!data.placements[axis].is_partial(), "parameter '", parameter.name, "' is Partial on axis '",
                data.mesh.axes()[axis].name, "': its gradient has no norm before it is reduced");
    bool replicated = data.placements[axis].is_replicate();
    if (replicated && data.mesh.coordinate(data.mesh.axes()[axis].name) != 0) return false;
  }
  return true;
}

// Meshes in the order of their first parameter, which is the same on every rank. A parameter without gradient
// still names its mesh: other ranks may have one.
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

// Every rank's value. Gathered rather than summed, so that all ranks add in one order and see whose isn't
// finite.
std::vector<double> value_of_each_rank(const DeviceMesh& mesh, double value) {
  if (mesh.size() == 1) return {value};
  at::Tensor mine = at::full({1}, value, at::dtype(at::kDouble));
  at::Tensor all = at::empty({mesh.size()}, mine.options());
  mesh.group()->all_gather(all, mine, kLabel).wait();
  return {all.const_data_ptr<double>(), all.const_data_ptr<double>() + all.numel()};
}

std::vector<at::Tensor> gradients_of(const std::vector<Parameter>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) {
    if (parameter.data.local.grad().defined()) gradients.push_back(parameter.data.local.grad());
  }
  return gradients;
}

}  // namespace

GradNorm clip_grad_norm(const std::vector<Parameter>& parameters, double max_norm) {
  TITAN_CHECK(max_norm >= 0, "max_norm must be at least 0, got ", max_norm);
  at::NoGradGuard no_grad;
  GradNorm result;
  double squares = 0;
  for (const auto& [mesh, counted] : by_mesh(parameters)) {
    std::vector<double> of_ranks = value_of_each_rank(mesh, sum_of_squares(counted));
    for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
      squares += of_ranks[rank];
      bool first = !std::isfinite(of_ranks[rank]) && result.finite();
      if (first) result.nonfinite_rank = mesh.ranks()[rank];
    }
  }
  result.norm = std::sqrt(squares);
  if (!result.finite()) return result;
  result.factor = std::min(1.0, max_norm / (result.norm + 1e-6));
  std::vector<at::Tensor> gradients = gradients_of(parameters);
  if (result.factor < 1 && !gradients.empty()) at::_foreach_mul_(gradients, result.factor);
  return result;
}

}  // namespace titan::optim
