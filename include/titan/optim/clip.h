#pragma once

// The norm of all gradients over all ranks, and clipping by it.
//
//   const titan::optim::GradNorm norm = titan::optim::clip_grad_norm(titan::parameters(model), 1.0);
//   if (!norm.finite()) std::printf("rank %d has a NaN\n", norm.nonfinite_rank);

#include <limits>
#include <vector>

#include "titan/parallel/parameters.h"

namespace titan::optim {

struct GradNorm {
  double norm = 0;    ///< 2-norm of all gradients before clipping, the same bits on every rank of a mesh
  double factor = 1;  ///< the factor that the gradients were multiplied by
  /// The lowest world rank whose own gradients have an infinity or NaN; -1: all are finite.
  int nonfinite_rank = -1;
  bool finite() const { return nonfinite_rank < 0; }
};

/// Multiplies the gradients (data.local.grad(), placed as their parameters) by min(1, max_norm / (norm +
/// 1e-6)), as torch.nn.utils.clip_grad_norm_. Squares are summed in double, each element once, whether
/// sharded or replicated, with one small exchange for all parameters of a mesh. The result doesn't depend on
/// the number of threads. A parameter without a gradient counts as zero. With an infinite `max_norm`, or a
/// norm that isn't finite, gradients stay unchanged. `pipeline` has the ranks with other stages' parameters,
/// whose gradients count, too. Blocking; collective over the parameters' meshes and `pipeline`. Throws Error
/// for a Partial parameter.
GradNorm clip_grad_norm(const std::vector<Parameter>& parameters,
                        double max_norm = std::numeric_limits<double>::infinity(),
                        const DeviceMesh& pipeline = {});

/// A norm that the host hasn't read yet.
struct LaunchedGradNorm {
  /// double [n], on the gradients' device: each rank's own sum of squares, and in a pipeline, from
  /// first_summed on, each stage's sum.
  at::Tensor squares;
  size_t first_summed = 0;
  std::vector<int> ranks;  ///< the n world ranks that `squares` belong to
  at::Tensor norm;         ///< double scalar on the device
  /// The same, what clipping multiplies the gradients by: 1 if the norm isn't finite. Undefined if max_norm is infinite.
  at::Tensor factor;
  /// The result of clip_grad_norm(), except for the factor, from `squares` copied to the host.
  GradNorm read(const double* host_squares) const;
};

/// The norm and the factor of clip_grad_norm(), only queued on `device`, so that the host can run ahead of a
/// GPU. The gradients stay unchanged until Optimizer::step_unless() multiplies them by the factor.
LaunchedGradNorm launch_grad_norm(const std::vector<Parameter>& parameters, double max_norm,
                                  at::Device device, const DeviceMesh& pipeline = {});

}  // namespace titan::optim
