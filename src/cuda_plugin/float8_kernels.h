#pragma once

// Float8 on a GPU: functions that launch the kernels in float8_scales.cu, float8_casts.cu and float8_blocks.cu, which don't use LibTorch. They
// return at once; device memory must stay valid until the stream has run the kernel.

#include <cstdint>
#include <span>

#include <cuda_runtime_api.h>

#include "cuda_plugin/source.h"

namespace titan::float8::cuda {

using titan::cuda::Source;
enum class Format { E4m3, E5m2 };

/// A matrix [rows, columns], stored row by row without gaps.
struct Matrix {
  const void* data = nullptr;
  Source source = Source::Float;
  int64_t rows = 0, columns = 0;
};

// Functions that take a span do the same for each of its matrices, which have one dtype, up to kMaxMatrices in one launch.
constexpr int kMaxMatrices = 8;

// ---- magnitudes and scales

/// The largest magnitudes of parts of the matrix, fp32, and of parts of each column, [parts, columns] in the matrix's dtype, which is
/// exact. The largest of all is found by the kernels that need it.
struct Measurement {
  Matrix x;
  void* out = nullptr;
};
int64_t parts_of_matrix(const Matrix& x);
void launch_magnitudes(std::span<const Measurement> all, cudaStream_t stream);
int64_t parts_of_columns(const Matrix& x);
void launch_magnitudes_of_columns(std::span<const Measurement> all, cudaStream_t stream);
/// out: one fp32 per row.
void launch_amax_of_rows(float* out, const Matrix& x, cudaStream_t stream);

/// The largest magnitude of each matrix, fp32. The caller zeroes them.
void launch_amax_of_many(std::span<const Measurement> all, cudaStream_t stream);

/// A scale is largest / max(amax, 1e-12), computed in double, rounded to fp32.
struct ScaleOptions {
  float largest = 0;         ///< the format's largest value
  float scale_of_least = 0;  ///< largest / 1e-12
  bool power_of_two = false;
};
ScaleOptions scale_options(double largest, bool power_of_two);
/// Writes scales and their inverses.
void launch_scale(float* out, float* inverse, const float* amax, int64_t count, const ScaleOptions& options,
                  cudaStream_t stream);

/// The values that a delayed scale reads and writes ([Note: delayed scales] in titan/float8/convert.h), on the device.
struct History {
  const float* largest = nullptr;
  float* pending = nullptr;  ///< null: the matrix isn't recorded
};

/// A matrix's scale, or what it is made from: the magnitudes of its parts.
struct MatrixScale {
  const float* scale = nullptr;
  const float* magnitudes = nullptr;
  int64_t count = 0;
  ScaleOptions options = {};
  History history = {};          ///< the scale is delayed
  float* scale_out = nullptr;    ///< null: not written
  float* inverse_out = nullptr;  ///< 1 / scale
};
/// Writes a delayed scale.
void launch_delayed_scale(const MatrixScale& scale, cudaStream_t stream);

/// history [rows, steps] shifts by one step and begins with pending [rows], which becomes 0. largest [rows] is the new history's.
struct Histories {
  float* history = nullptr;
  float* pending = nullptr;
  float* largest = nullptr;
  int64_t rows = 0, steps = 0;
};
void launch_update_histories(const Histories& histories, cudaStream_t stream);

// ---- casts

/// The cast, if `rows` isn't null, and the transposed cast [columns, rows], if `columns` isn't.
struct CastTiles {
  uint8_t* rows = nullptr;
  uint8_t* columns = nullptr;
};
template <class Scale>
struct CastOf {
  Matrix x;
  CastTiles out;
  Scale scale;
};
/// All have the same outputs.
void launch_cast(std::span<const CastOf<MatrixScale>> all, Format format, cudaStream_t stream);

/// Casts and measures at once, by the history's scale. `scale.magnitudes` has room for parts_of_cast(). A second launch makes the scale
/// and its inverse, and casts if the history is empty.
int64_t parts_of_cast(const CastTiles& out, const Matrix& x);
void launch_cast_delayed(const CastOf<MatrixScale>& cast, Format format, cudaStream_t stream);

/// One scale per row.
struct CastRows {
  Matrix x;
  uint8_t* out = nullptr;
  const float* scales = nullptr;
};
void launch_cast_by_rows(std::span<const CastRows> all, Format format, cudaStream_t stream);

/// The columns' scales, or what a launch before the cast makes them from: the magnitudes [count, columns] of their parts, in the matrix's
/// dtype. All matrices have one or all have the other.
struct ColumnScales {
  const float* scale = nullptr;
  const void* magnitudes = nullptr;
  int64_t count = 0;
  ScaleOptions options = {};
  float *scale_out = nullptr, *inverse_out = nullptr;
};
void launch_scales_of_columns(std::span<const CastOf<ColumnScales>> all, cudaStream_t stream);
void launch_cast_columns(std::span<const CastOf<ColumnScales>> all, Format format, cudaStream_t stream);

/// Rows that are measured and cast in one pass, and the magnitudes of parts of the columns, [parts, columns] in the matrix's dtype, if
/// they aren't null. Rows are whole chunks of 16 elements, aligned to 16 bytes, and at most so long:
constexpr int64_t kMaxRowOfRegisters = 16384;
struct MeasuredRows {
  Matrix x;
  uint8_t* data = nullptr;
  float* scale = nullptr;
  float* inverse = nullptr;
  void* magnitudes = nullptr;  ///< only for one matrix in a launch
};
int64_t parts_of_measured_rows(const Matrix& x);
void launch_measured_rows(std::span<const MeasuredRows> all, Format format, const ScaleOptions& options,
                          cudaStream_t stream);

/// out [columns, rows], bytes; x.source isn't read.
struct Transpose {
  Matrix x;
  uint8_t* out = nullptr;
};
void launch_transpose(std::span<const Transpose> all, cudaStream_t stream);

/// out = sums times its row's and its column's scale; one or all of them. `out` may be the sums' memory if the dtypes are equal.
struct SumScales {
  const float* of_rows = nullptr;
  const float* of_columns = nullptr;
  int64_t rows = 1, columns = 1;  ///< number of scales
};
void launch_scale_sums(void* out, Source to, const Matrix& sums, const SumScales& scales,
                       cudaStream_t stream);
/// A 1 in the current device's memory: the scale of sums that launch_scale_sums() scales. An error is CUDA's last one, as a launch's.
const float* one_on_device();

/// out [rows, columns] = a [rows, length] b^T [columns, length], all contiguous, or out += that.
struct Product {
  void* out = nullptr;
  Source source{};  ///< out's dtype
  const void *a = nullptr, *b = nullptr;
  Format format_a = Format::E4m3, format_b = Format::E4m3;
  /// On the device: the inverse of a matrix's scale, or of each vector's (compute capability 9.x), in fp32; or the exponents of blocks of 32, in the
  /// hardware's order (10.0 and later).
  const void *factors_a = nullptr, *factors_b = nullptr;
  enum class Factors : uint8_t { OfMatrices, OfVectors, OfBlocks } factors{};
  int64_t rows = 0, columns = 0, length = 0;
  bool fast_accumulation = false;
  bool adds = false;
};
/// By cuBLASLt. Returns false and does nothing if it has no such product.
bool put_product(const Product& product, cudaStream_t stream);

/// Vectors in blocks of 32: data [vectors, blocks * 32], exponents [vectors, blocks], or in the hardware's order.
struct CastBlocks {
  uint8_t* data = nullptr;
  uint8_t* exponents = nullptr;
  bool for_hardware = false;  ///< blocked_layout() of src/float8/cast.h; the caller zeroes its padding
};
struct BlockOptions {
  bool round_up = false;
  Format format = Format::E4m3;
};
/// Casts x's rows, or its columns, in blocks.
void launch_cast_row_blocks(const CastBlocks& out, const Matrix& x, const BlockOptions& options,
                            cudaStream_t stream);
void launch_cast_column_blocks(const CastBlocks& out, const Matrix& x, const BlockOptions& options,
                               cudaStream_t stream);
/// Both, with one read of x.
void launch_cast_both_blocks(const CastBlocks& rows, const CastBlocks& columns, const Matrix& x,
                             const BlockOptions& options, cudaStream_t stream);

}  // namespace titan::float8::cuda
