// Float8's magnitudes and scales. So far these have run on virtual GPUs only (docs/verified_on.md). Kernels that read a matrix are
// memory-bound, so a thread reads 16 bytes at a time if the rows allow it.

#include "cuda_plugin/float8_numbers.h"
#include "cuda_plugin/launch.h"

namespace titan::float8::cuda {

namespace {

__host__ __device__ int64_t parts_of_elements(int64_t count) {
  const int64_t parts = (count + kThreads * 32 - 1) / (kThreads * 32);
  return parts < 1024 ? parts : 1024;
}
__host__ __device__ int64_t rows_per_part(int64_t rows) {
  const int64_t least = (rows + kMaxParts - 1) / kMaxParts;
  return least > 256 ? least : 256;
}

// Each thread block writes the largest of its part. The kernel that needs the largest of all reads all of them, so nothing is zeroed
// before, and no thread waits for another block's.
template <class T>
__global__ void magnitudes_kernel(Batch<Measurement> batch) {
  const Measurement work = batch.of[blockIdx.z];
  const int64_t count = work.x.rows * work.x.columns, parts = parts_of_elements(count);
  if (blockIdx.x >= parts) return;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const unsigned best =
      largest_of_block(largest_of<2>(static_cast<const T*>(work.x.data), count, first, parts * kThreads));
  if (threadIdx.x == 0) static_cast<float*>(work.out)[blockIdx.x] = __uint_as_float(best);
}

template <class T>
__global__ void amax_of_rows_kernel(float* out, const T* x, int64_t rows, int64_t columns) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const unsigned best = largest_of_block(largest_of<2>(x + row * columns, columns, threadIdx.x, kThreads));
    if (threadIdx.x == 0) out[row] = __uint_as_float(best);
  }
}

// The largest magnitudes of a pack of columns in every kStep-th row from `first` to `end`. Reads kAtOnce rows before it uses the first.
template <int kAtOnce, int kStep, class T>
__device__ void measure_columns(unsigned (&best)[Pack<T>::kSize], const Matrix& x, int64_t column,
                                int64_t first, int64_t end) {
  constexpr int kSize = Pack<T>::kSize;
  const auto* from = static_cast<const T*>(x.data) + column;
  const bool packed = reinterpret_cast<uintptr_t>(x.data) % sizeof(Pack<T>) == 0 && x.columns % kSize == 0;
  if (packed && column < x.columns) {
    for (int64_t row = first; row < end; row += kAtOnce * kStep) {
      PackBits bits[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        // After the end the first one again, because nvcc makes a branch of a condition, with the use of what it reads.
        const int64_t each = row + k * kStep < end ? row + k * kStep : row;
        bits[k] = *reinterpret_cast<const PackBits*>(from + each * x.columns);
      }
#pragma unroll
      for (const PackBits& some : bits) {
        const Pack<T> pack = unpacked<T>(some);
#pragma unroll
        for (int e = 0; e < kSize; ++e) best[e] = max(best[e], magnitude(pack.values[e]));
      }
    }
  } else {
    for (int64_t row = first; row < end; row += kStep)
#pragma unroll
      for (int e = 0; e < kSize; ++e)
        if (column + e < x.columns) best[e] = max(best[e], magnitude(from[row * x.columns + e]));
  }
}

// A lane has a pack of columns, and each warp every eighth row of the part.
template <class T>
__global__ void magnitudes_of_columns_kernel(Batch<Measurement> batch) {
  constexpr int kSize = Pack<T>::kSize, kWarps = kThreads / kWarp;
  __shared__ unsigned of_warps[kWarps][kWarp * kSize];
  const Measurement work = batch.of[blockIdx.z];
  auto* out = static_cast<T*>(work.out);
  const int64_t rows = work.x.rows, columns = work.x.columns, part_rows = rows_per_part(rows);
  if (int64_t{blockIdx.x} * kWarp * kSize >= columns || blockIdx.y * part_rows >= rows) return;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  unsigned best[kSize] = {};
  measure_columns<2, kWarps, T>(best, work.x, (int64_t{blockIdx.x} * kWarp + lane) * kSize,
                                blockIdx.y * part_rows + warp,
                                min(rows, (blockIdx.y + int64_t{1}) * part_rows));
#pragma unroll
  for (int e = 0; e < kSize; ++e) of_warps[warp][e * kWarp + lane] = best[e];
  __syncthreads();
  for (int i = threadIdx.x; i < kWarp * kSize; i += kThreads) {
    unsigned largest = 0;
    for (int w = 0; w < kWarps; ++w) largest = max(largest, of_warps[w][i % kSize * kWarp + i / kSize]);
    const int64_t place = int64_t{blockIdx.x} * kWarp * kSize + i;
    if (place < columns) out[blockIdx.y * columns + place] = narrow<T>(__uint_as_float(largest));
  }
}

// The scales of columns, from the magnitudes of their parts. Four lanes have a pack of columns each, so that there are thread blocks and reads
// at once for a GPU, and the threads of a block share the parts.
constexpr int kColumnLanes = 4;
template <class T>
__global__ void scales_of_columns_kernel(Batch<CastOf<ColumnScales>> batch) {
  constexpr int kSize = Pack<T>::kSize, kColumns = kColumnLanes * kSize, kWarps = kThreads / kWarp;
  __shared__ unsigned of_warps[kWarps][kColumns];
  const CastOf<ColumnScales>& work = batch.of[blockIdx.z];
  const ColumnScales& scales = work.scale;
  const int64_t columns = work.x.columns, first = int64_t{blockIdx.x} * kColumns;
  if (first >= columns) return;
  const int lane = threadIdx.x % kColumnLanes;
  const Matrix parts{scales.magnitudes, work.x.source, scales.count, columns};
  unsigned best[kSize] = {};
  measure_columns<4, kThreads / kColumnLanes, T>(best, parts, first + lane * kSize,
                                                 threadIdx.x / kColumnLanes, parts.rows);
#pragma unroll
  for (int e = 0; e < kSize; ++e) {
#pragma unroll
    for (int lanes = kWarp / 2; lanes >= kColumnLanes; lanes /= 2)
      best[e] = max(best[e], __shfl_xor_sync(kAllLanes, best[e], lanes));
    if (threadIdx.x % kWarp < kColumnLanes) of_warps[threadIdx.x / kWarp][lane * kSize + e] = best[e];
  }
  __syncthreads();
  const int64_t column = first + threadIdx.x;
  if (threadIdx.x >= kColumns || column >= columns) return;
  unsigned largest = 0;
  for (int warp = 0; warp < kWarps; ++warp) largest = max(largest, of_warps[warp][threadIdx.x]);
  const float scale = scale_for(__uint_as_float(largest), scales.options);
  scales.scale_out[column] = scale;
  scales.inverse_out[column] = __fdiv_rn(1.0f, scale);
}

__global__ void scale_kernel(float* out, float* inverse, const float* amax, int64_t count,
                             ScaleOptions options) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const float scale = scale_for(amax[i], options);
  out[i] = scale;
  inverse[i] = __fdiv_rn(1.0f, scale);
}

// One thread block.
__global__ void delayed_scale_kernel(MatrixScale scale) { scale_of_matrix(scale); }

// A thread has one row.
__global__ void update_histories_kernel(Histories all) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= all.rows) return;
  float* history = all.history + row * all.steps;
  const float newest = all.pending[row];
  unsigned best = magnitude(newest);
  for (int64_t i = all.steps - 1; i > 0; --i) {
    history[i] = history[i - 1];
    best = max(best, magnitude(history[i]));
  }
  history[0] = newest;
  all.largest[row] = __uint_as_float(best);
  all.pending[row] = 0;
}

// The largest of all doesn't depend on the order in which thread blocks come.
template <class T>
__global__ void amax_of_many_kernel(Batch<Measurement> batch) {
  const Measurement work = batch.of[blockIdx.z];
  const int64_t count = work.x.rows * work.x.columns, parts = parts_of_elements(count);
  if (blockIdx.x >= parts) return;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  unsigned best = largest_of<2>(static_cast<const T*>(work.x.data), count, first, parts * kThreads);
  best = __reduce_max_sync(0xffffffffu, best);
  if (threadIdx.x % kWarp == 0) atomicMax(static_cast<unsigned*>(work.out), best);
}

}  // namespace

int64_t parts_of_matrix(const Matrix& x) { return parts_of_elements(x.rows * x.columns); }

namespace {

dim3 grid_of_parts(std::span<const Measurement> works) {
  return {most(works, [](const Measurement& work) { return parts_of_matrix(work.x); }), 1,
          static_cast<unsigned>(works.size())};
}

}  // namespace

void launch_magnitudes(std::span<const Measurement> all, cudaStream_t stream) {
  in_batches(all, [&](const Batch<Measurement>& batch, std::span<const Measurement> works) {
    with_source(works[0].x.source, [&]<class T>(T) {
      launch_kernel(magnitudes_kernel<T>, grid_of_parts(works), dim3(kThreads), stream, batch);
    });
  });
}

void launch_amax_of_many(std::span<const Measurement> all, cudaStream_t stream) {
  in_batches(all, [&](const Batch<Measurement>& batch, std::span<const Measurement> works) {
    with_source(works[0].x.source, [&]<class T>(T) {
      launch_kernel(amax_of_many_kernel<T>, grid_of_parts(works), dim3(kThreads), stream, batch);
    });
  });
}

void launch_amax_of_rows(float* out, const Matrix& x, cudaStream_t stream) {
  with_source(x.source, [&]<class T>(T) {
    launch_kernel(amax_of_rows_kernel<T>, dim3(static_cast<unsigned>(blocks_for(x.rows, 1))), dim3(kThreads),
                  stream, out, static_cast<const T*>(x.data), x.rows, x.columns);
  });
}

int64_t parts_of_columns(const Matrix& x) { return parts_of(x.rows, rows_per_part(x.rows)); }

void launch_magnitudes_of_columns(std::span<const Measurement> all, cudaStream_t stream) {
  in_batches(all, [&](const Batch<Measurement>& batch, std::span<const Measurement> works) {
    with_source(works[0].x.source, [&]<class T>(T) {
      const dim3 grid(
          most(works,
               [](const Measurement& work) { return parts_of(work.x.columns, kWarp * Pack<T>::kSize); }),
          most(works, [](const Measurement& work) { return parts_of_columns(work.x); }),
          static_cast<unsigned>(works.size()));
      launch_kernel(magnitudes_of_columns_kernel<T>, grid, dim3(kThreads), stream, batch);
    });
  });
}

void launch_scales_of_columns(std::span<const CastOf<ColumnScales>> all, cudaStream_t stream) {
  in_batches(all, [&](const Batch<CastOf<ColumnScales>>& batch, std::span<const CastOf<ColumnScales>> works) {
    with_source(works[0].x.source, [&]<class T>(T) {
      const dim3 grid(most(works,
                           [](const CastOf<ColumnScales>& work) {
                             return parts_of(work.x.columns, kColumnLanes * Pack<T>::kSize);
                           }),
                      1, static_cast<unsigned>(works.size()));
      launch_kernel(scales_of_columns_kernel<T>, grid, dim3(kThreads), stream, batch);
    });
  });
}

ScaleOptions scale_options(double largest, bool power_of_two) {
  return {.largest = static_cast<float>(largest),
          .scale_of_least = static_cast<float>(largest / 1e-12),
          .power_of_two = power_of_two};
}

void launch_scale(float* out, float* inverse, const float* amax, int64_t count, const ScaleOptions& options,
                  cudaStream_t stream) {
  launch_kernel(scale_kernel, dim3(static_cast<unsigned>(parts_of(count, kThreads))), dim3(kThreads), stream,
                out, inverse, amax, count, options);
}

void launch_delayed_scale(const MatrixScale& scale, cudaStream_t stream) {
  launch_kernel(delayed_scale_kernel, dim3(1), dim3(kThreads), stream, scale);
}

void launch_update_histories(const Histories& histories, cudaStream_t stream) {
  launch_kernel(update_histories_kernel, dim3(static_cast<unsigned>(parts_of(histories.rows, kThreads))),
                dim3(kThreads), stream, histories);
}

}  // namespace titan::float8::cuda
