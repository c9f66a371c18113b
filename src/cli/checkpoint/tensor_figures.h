#pragma once

// A saved state's tensors, a part at a time.

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/checkpoint/manifest.h"
#include "titan/checkpoint/saved_state.h"
#include "titan/tensor/placement.h"

namespace titan::cli {

/// What is in memory at a time.
constexpr int64_t kSlabBytes = 16 << 20;

/// The elements in `box`, contiguous.
at::Tensor read_slab(const checkpoint::SavedState& state, const std::string& name, const Box& box);

// What is said of a tensor's numbers, and of two tensors' difference, added up slab by slab in doubles.

/// Of the finite elements, but for the counts. Without any, NaN and 0.
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

/// Of tensors of one shape, a minus b.
struct TensorDifference {
  int64_t num_elements = 0;
  int64_t num_different = 0;         ///< by bits; of two dtypes by value, and NaN is NaN
  std::vector<int64_t> first_index;  ///< of the first of these
  double max_abs = 0;                ///< infinite where one of the two isn't finite
  double relative_norm() const;      ///< |a - b| / |a|

  /// `box`: where the slabs lie in the tensors.
  void add(const at::Tensor& a, const at::Tensor& b, const Box& box);

 private:
  double squares_of_difference_ = 0, squares_of_a_ = 0;
};

// What is said of a saved tensor without reading it.

/// "float32"
std::string dtype_text(at::ScalarType dtype);
int64_t num_elements(const checkpoint::StateTensor& tensor);
int64_t num_bytes(const checkpoint::StateTensor& tensor);
/// "dim 0 by fsdp 4, dim 1 by tp 2; on pp 1 alone; 2 copies"
std::string layout_text(const checkpoint::StateTensor& tensor, int64_t world_size);
/// The axes of which any layout speaks, the outermost first: "pp 2, fsdp 4, tp 2".
std::string mesh_text(const checkpoint::StateTable& table);

}  // namespace titan::cli
