#pragma once

// The norm of all gradients over all ranks, and clipping by it.

#include <limits>
#include <vector>

#include "titan/parallel/parameters.h"

namespace titan::optim {

struct GradNorm {
  double norm = 0;    ///< 2-norm of all gradients before clipping, the same bits on every rank of a mesh
  double factor = 1;  ///< what the gradients were multiplied by
  int nonfinite_rank =
      -1;  ///< lowest world rank whose own gradients hold an infinity or NaN; -1: all are finite
  bool finite() const { return nonfinite_rank < 0; }
};

/// Multiplies the gradients (data.local.grad(), placed as their parameters) by min(1, max_norm / (norm +
/// 1e-6)), as torch.nn.utils.clip_grad_norm_. Squares are summed in double, each element of a sharded
/// gradient once and those of a replicated one once, with one small exchange for all parameters of a mesh.
/// The result doesn't depend on the number of threads. Parameters without gradient count as zero. An infinite
/// `max_norm` only measures; nor is anything changed when the norm isn't finite. `pipeline`: ranks that hold
/// other stages' parameters, whose gradients count too. Blocking; collective over the parameters' meshes and
/// `pipeline`. Throws Error for a Partial parameter.
GradNorm clip_grad_norm(const std::vector<Parameter>& parameters,
                        double max_norm = std::numeric_limits<double>::infinity(),
                        const DeviceMesh& pipeline = {});

/// A norm that the host hasn't read.
struct LaunchedGradNorm {
  at::Tensor squares;  ///< double [n], on the gradients' device: each rank's own sum of squares, and in
                       ///< a pipeline then each stage's, those of `ranks` from first_summed on
  size_t first_summed = 0;
  std::vector<int> ranks;  ///< n world ranks: whose
  at::Tensor norm;         ///< double scalar on the device
  /// What clip_grad_norm() returns, but for the factor: from `squares` as they came to the host.
  GradNorm read(const double* host_squares) const;
};

/// clip_grad_norm() that only queues its work on `device`, so that the host can run ahead of a GPU. Gradients
/// are multiplied on the device, by 1 where the norm isn't finite.
LaunchedGradNorm launch_clip_grad_norm(const std::vector<Parameter>& parameters, double max_norm,
                                       at::Device device, const DeviceMesh& pipeline = {});

}  // namespace titan::optim
