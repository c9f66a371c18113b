#pragma once

// Statistics, differences and layouts of a saved state's tensors, read slab by slab.

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/checkpoint/manifest.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/tensor/placement.h"

namespace titan::cli {

/// Bytes of a tensor that are in memory at a time.
constexpr int64_t kSlabBytes = 16 << 20;

/// The elements in `box`, contiguous.
at::Tensor read_slab(const checkpoint::SavedState& state, const std::string& name, const Box& box);

/// Statistics of the finite elements, added up slab by slab in doubles. Without finite elements: NaN, and norm 0.
struct TensorStats {
  int64_t num_elements = 0;
  int64_t num_not_finite = 0;
  double mean = std::numeric_limits<double>::quiet_NaN();
  double min = std::numeric_limits<double>::quiet_NaN();
  double max = std::numeric_limits<double>::quiet_NaN();
  double norm = 0;
  double std() const;  ///< sqrt(mean of (x - mean)^2)

  void add(const at::Tensor& slab);

 private:
  double squares_about_mean_ = 0;
};

/// The difference a - b of two tensors of one shape, added up slab by slab in doubles.
struct TensorDifference {
  int64_t num_elements = 0;
  int64_t num_different = 0;         ///< compared by bits; for two dtypes by value, where NaN equals NaN
  std::vector<int64_t> first_index;  ///< index of the first different element
  double max_abs = 0;                ///< infinite if either element isn't finite
  double relative_norm() const;      ///< |a - b| / |a|

  /// `box`: the place of the slabs in the tensors.
  void add(const at::Tensor& a, const at::Tensor& b, const Box& box);

 private:
  double squares_of_difference_ = 0, squares_of_a_ = 0;
};

// Texts about a saved tensor, without reading it.

/// "float32"
std::string dtype_text(at::ScalarType dtype);
int64_t num_elements(const checkpoint::StateTensor& tensor);
int64_t num_bytes(const checkpoint::StateTensor& tensor);
/// "dim 0 by fsdp 4, dim 1 by tp 2; only on pp 1; 2 copies"
std::string layout_text(const checkpoint::StateTensor& tensor, int64_t world_size);
/// The mesh axes that any layout names, outermost first: "pp 2, fsdp 4, tp 2".
std::string mesh_text(const checkpoint::StateTable& table);

}  // namespace titan::cli
