// Float8's casts. So far these have run on virtual GPUs only (docs/verified_on.md). Each kernel is one pass and memory-bound, so a
// thread reads 16 bytes at a time if the rows allow it.

#include <type_traits>

#include "cuda_plugin/float8_numbers.h"
#include "cuda_plugin/launch.h"

namespace titan::float8::cuda {

// A delayed scale: the kernel measures the matrix while it casts. Nothing is cast if the history is empty.
struct HistoryScale {
  const float* largest = nullptr;
  ScaleOptions options = {};
  float* magnitudes = nullptr;  // one for each thread block
};

namespace {

__device__ float scale_of_matrix(const HistoryScale& from) { return scale_for(*from.largest, from.options); }
__device__ bool casts(const HistoryScale& from) { return *from.largest > 0; }
// With a history, the launch before has cast.
__device__ bool casts(const MatrixScale& from) {
  return !from.history.largest || !(*from.history.largest > 0);
}
__device__ bool casts(const ColumnScales& /*from*/) { return true; }

// By one scale.
template <Format format, class T, class Scale>
__global__ void cast_kernel(Batch<CastOf<Scale>> batch) {
  constexpr bool kMeasures = std::is_same_v<Scale, HistoryScale>;
  const CastOf<Scale> work = batch.of[blockIdx.z];
  const auto* x = static_cast<const T*>(work.x.data);
  uint8_t* out = work.out.rows;
  const int64_t count = work.x.rows * work.x.columns;
  if (int64_t{blockIdx.x} * kThreads * kChunk >= count) return;
  const bool writes = casts(work.scale);
  if (!kMeasures && !writes && blockIdx.x > 0) return;
  const float scale = scale_of_matrix(work.scale);
  if (!kMeasures && !writes) return;
  unsigned best = 0;
  const bool whole = takes_chunks(x, kChunk) && takes_chunks(out, kChunk);
  const int64_t step = int64_t{gridDim.x} * kThreads * kChunk;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kChunk; i < count; i += step) {
    const Chunk<T> chunk = load_chunk(x + i, count - i, whole);
    if constexpr (kMeasures) best = max(best, largest_of_chunk(chunk));
    if (!writes) continue;
    store_chunk(out + i, cast_chunk<format>([&](int e) { return widen(chunk.values[e]) * scale; }), count - i,
                whole);
  }
  if constexpr (kMeasures) {
    best = largest_of_block(best);
    if (threadIdx.x == 0) work.scale.magnitudes[blockIdx.x] = __uint_as_float(best);
  }
}

// Each row by its scale.
template <Format format, class T>
__global__ void cast_by_rows_kernel(Batch<CastRows> batch) {
  const CastRows work = batch.of[blockIdx.z];
  const auto* x = static_cast<const T*>(work.x.data);
  const int64_t columns = work.x.columns, chunks = (columns + kChunk - 1) / kChunk;
  const bool whole = takes_chunks(x, columns) && takes_chunks(work.out, columns);
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < work.x.rows * chunks; i += step) {
    const int64_t row = i / chunks, column = i % chunks * kChunk, place = row * columns + column;
    const float scale = work.scales[row];
    const Chunk<T> chunk = load_chunk(x + place, columns - column, whole);
    store_chunk(work.out + place, cast_chunk<format>([&](int e) { return widen(chunk.values[e]) * scale; }),
                columns - column, whole);
  }
}

// Measures and casts rows that stay in registers in between, and measures the columns of the thread block's rows. A thread has kRowChunks, no more
// than the longest row takes, so that more thread blocks fit.
constexpr int kMaxRowChunks = 2;
static_assert(kMaxRowOfRegisters == kMaxRowThreads * kMaxRowChunks * kChunk);
template <Format format, class T, int kRowChunks>
__global__ void __launch_bounds__(kMaxRowThreads)
    measured_rows_kernel(Batch<MeasuredRows> batch, ScaleOptions options) {
  const MeasuredRows out = batch.of[blockIdx.z];
  const auto* x = static_cast<const T*>(out.x.data);
  const int64_t rows = out.x.rows;
  const int columns = static_cast<int>(out.x.columns), chunks = columns / kChunk;
  unsigned of_columns[kRowChunks][kChunk] = {};
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    Chunk<T> held[kRowChunks];
    unsigned best = 0;
#pragma unroll
    for (int k = 0; k < kRowChunks; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i < chunks) held[k] = load_chunk(x + row * columns + i * kChunk, kChunk, true);
    }
#pragma unroll
    for (int k = 0; k < kRowChunks; ++k) {
      if (static_cast<int>(threadIdx.x + k * blockDim.x) >= chunks) continue;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const unsigned size = magnitude(held[k].values[e]);
        best = max(best, size);
        of_columns[k][e] = max(of_columns[k][e], size);
      }
    }
    const float scale = scale_for(__uint_as_float(largest_of_block(best)), options);
    if (threadIdx.x == 0) {
      out.scale[row] = scale;
      out.inverse[row] = __fdiv_rn(1.0f, scale);
    }
#pragma unroll
    for (int k = 0; k < kRowChunks; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= chunks) continue;
      const uint4 bytes = cast_chunk<format>([&](int e) { return widen(held[k].values[e]) * scale; });
      store_chunk(out.data + row * columns + i * kChunk, bytes, kChunk, true);
    }
  }
  if (!out.magnitudes) return;
  constexpr int kSize = Pack<T>::kSize;
  auto* to = reinterpret_cast<Pack<T>*>(static_cast<T*>(out.magnitudes) + int64_t{blockIdx.x} * columns);
#pragma unroll
  for (int k = 0; k < kRowChunks; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i >= chunks) continue;
#pragma unroll
    for (int pack = 0; pack < kChunk / kSize; ++pack) {
      Pack<T> largest;
#pragma unroll
      for (int e = 0; e < kSize; ++e)
        largest.values[e] = narrow<T>(__uint_as_float(of_columns[k][pack * kSize + e]));
      to[i * (kChunk / kSize) + pack] = largest;
    }
  }
}

// Casts tiles of 128 by 128, each read once, and transposes them in shared memory, so that both sides are written 16 bytes at a time
// along their rows.
constexpr int kTile = 128, kTileChunks = kTile / kChunk;
constexpr int kSteps = kTile * kTileChunks / kThreads;  // a thread's chunks of a tile

// Writes a tile's columns as rows of `out` [rows, columns], from row and column on. Chunk c of the tile's row r is at place
// c ^ (r / 16), so that threads which read a column read different banks. All threads call it.
__device__ void store_transposed(uint8_t* out, const uint4 (&tile)[kTile][kTileChunks], int64_t rows,
                                 int64_t columns, int64_t row, int64_t column) {
  const int inner = threadIdx.x % kTileChunks, outer = threadIdx.x / kTileChunks;
  const bool whole = takes_chunks(out, columns);
  __syncthreads();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int c = step * (kThreads / kTileChunks) + outer;
    const auto* bytes =
        reinterpret_cast<const uint8_t*>(tile[inner * kChunk]) + ((c / kChunk) ^ inner) * kChunk + c % kChunk;
    unsigned words[kChunk / 4] = {};
#pragma unroll
    for (int e = 0; e < kChunk; ++e) words[e / 4] |= unsigned{bytes[e * kTile]} << (e % 4 * 8);
    const int64_t place = column + inner * kChunk;
    if (row + c < rows)
      store_chunk(out + (row + c) * columns + place, make_uint4(words[0], words[1], words[2], words[3]),
                  columns - place, whole);
  }
  __syncthreads();
}

template <Format format, class T, class Scale>
__global__ void __launch_bounds__(kThreads) cast_tiles_kernel(Batch<CastOf<Scale>> batch) {
  constexpr bool kByColumn = std::is_same_v<Scale, ColumnScales>;
  constexpr bool kMeasures = std::is_same_v<Scale, HistoryScale>;
  __shared__ uint4 tile[kTile][kTileChunks];
  __shared__ float scales[kTile];
  const CastOf<Scale> work = batch.of[blockIdx.z];
  const auto& [from_matrix, out, from] = work;
  const auto* x = static_cast<const T*>(from_matrix.data);
  const int64_t rows = from_matrix.rows, columns = from_matrix.columns;
  const int64_t strips = (columns + kTile - 1) / kTile, tiles = (rows + kTile - 1) / kTile;
  if (blockIdx.y >= strips || blockIdx.x >= tiles) return;
  const bool writes = casts(from);
  if (!kMeasures && !writes && (blockIdx.x > 0 || blockIdx.y > 0)) return;
  float scale = 0;
  if constexpr (!kByColumn) scale = scale_of_matrix(from);
  if (!kMeasures && !writes) return;
  unsigned best = 0;
  const bool whole = takes_chunks(x, columns) && takes_chunks(out.rows, columns);
  const int inner = threadIdx.x % kTileChunks, outer = threadIdx.x / kTileChunks;
  for (int64_t strip = blockIdx.y; strip < strips; strip += gridDim.y) {
    if constexpr (kByColumn) {
      const int64_t own = strip * kTile + threadIdx.x;
      const float* all = from.scale ? from.scale : from.scale_out;
      if (threadIdx.x < kTile) scales[threadIdx.x] = own < columns ? all[own] : 0;
      __syncthreads();
    }
    const int64_t column = strip * kTile + inner * kChunk;
    for (int64_t first_row = blockIdx.x * int64_t{kTile}; first_row < tiles * kTile;
         first_row += gridDim.x * int64_t{kTile}) {
      Chunk<T> chunks[kSteps];
      const auto row_of = [&](int step) { return first_row + step * (kThreads / kTileChunks) + outer; };
      load_chunks(
          chunks, [&](int step) { return x + row_of(step) * columns + column; },
          [&](int step) { return row_of(step) < rows ? columns - column : 0; }, whole);
      if constexpr (kMeasures) {
#pragma unroll
        for (const Chunk<T>& chunk : chunks) best = max(best, largest_of_chunk(chunk));
      }
      if (!writes) continue;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int r = step * (kThreads / kTileChunks) + outer;
        const uint4 bytes = cast_chunk<format>([&](int e) {
          return widen(chunks[step].values[e]) * (kByColumn ? scales[inner * kChunk + e] : scale);
        });
        tile[r][inner ^ (r / kChunk)] = bytes;
        const int64_t row = first_row + r;
        if (out.rows && row < rows)
          store_chunk(out.rows + row * columns + column, bytes, columns - column, whole);
      }
      store_transposed(out.columns, tile, columns, rows, strip * kTile, first_row);
    }
  }
  if constexpr (kMeasures) {
    best = largest_of_block(best);
    if (threadIdx.x == 0) from.magnitudes[blockIdx.y * gridDim.x + blockIdx.x] = __uint_as_float(best);
  }
}

// Transposes bytes.
__global__ void __launch_bounds__(kThreads) transpose_kernel(Batch<Transpose> batch) {
  __shared__ uint4 tile[kTile][kTileChunks];
  const Transpose work = batch.of[blockIdx.z];
  const auto* x = static_cast<const uint8_t*>(work.x.data);
  const int64_t rows = work.x.rows, columns = work.x.columns;
  const bool whole = takes_chunks(x, columns);
  const int inner = threadIdx.x % kTileChunks, outer = threadIdx.x / kTileChunks;
  for (int64_t strip = blockIdx.y * int64_t{kTile}; strip < columns; strip += gridDim.y * int64_t{kTile})
    for (int64_t first_row = blockIdx.x * int64_t{kTile}; first_row < rows;
         first_row += gridDim.x * int64_t{kTile}) {
      const int64_t column = strip + inner * kChunk;
      const auto row_of = [&](int step) { return first_row + step * (kThreads / kTileChunks) + outer; };
      const auto left = [&](int step) { return row_of(step) < rows ? columns - column : 0; };
      uint4 held[kSteps] = {};
      if (whole) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          if (left(step) >= kChunk)
            held[step] = *reinterpret_cast<const uint4*>(x + row_of(step) * columns + column);
      } else {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          unsigned words[kChunk / 4] = {};
#pragma unroll
          for (int e = 0; e < kChunk; ++e)
            if (e < left(step))
              words[e / 4] |= unsigned{x[row_of(step) * columns + column + e]} << (e % 4 * 8);
          held[step] = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int r = step * (kThreads / kTileChunks) + outer;
        tile[r][inner ^ (r / kChunk)] = held[step];
      }
      store_transposed(work.out, tile, columns, rows, strip, first_row);
    }
}

// The sums of a product, scaled by its rows and columns.
template <class From, class To>
__global__ void scale_sums_kernel(To* out, const From* sums, SumScales scales, int64_t rows,
                                  int64_t columns) {
  const int64_t count = rows * columns, step = int64_t{gridDim.x} * kThreads;
  constexpr int kSize = 8;
  const bool packed = columns % kSize == 0 &&
                      reinterpret_cast<uintptr_t>(sums) % (kSize * sizeof(From)) == 0 &&
                      reinterpret_cast<uintptr_t>(out) % (kSize * sizeof(To)) == 0;
  struct alignas(kSize * sizeof(From)) Sums {
    From values[kSize];
  };
  struct alignas(kSize * sizeof(To)) Results {
    To values[kSize];
  };
  const auto scaled = [&](const From& sum, int64_t row, int64_t column) {
    return narrow<To>(widen(sum) * scales.of_rows[scales.rows > 1 ? row : 0] *
                      scales.of_columns[scales.columns > 1 ? column : 0]);
  };
  if (!packed) {
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step)
      out[i] = scaled(sums[i], i / columns, i % columns);
    return;
  }
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count / kSize; i += step) {
    const Sums from = reinterpret_cast<const Sums*>(sums)[i];
    Results to;
    const int64_t row = i * kSize / columns, column = i * kSize % columns;
#pragma unroll
    for (int e = 0; e < kSize; ++e) to.values[e] = scaled(from.values[e], row, column + e);
    reinterpret_cast<Results*>(out)[i] = to;
  }
}

alignas(16) __device__ float one = 1;

int64_t blocks_of_cast(const Matrix& x) { return blocks_for(x.rows * x.columns, kThreads * kChunk); }

// A thread block finds its scales before its first tile, so it has several if there are many.
dim3 blocks_of_tiles(const Matrix& x) {
  const int64_t strips = std::min(parts_of(x.columns, kTile), kMaxGrid), tiles = parts_of(x.rows, kTile);
  const int64_t groups = std::min(tiles, std::max<int64_t>(kMaxBlocks / 4 / strips, 1));
  return dim3(static_cast<unsigned>(groups), static_cast<unsigned>(strips));
}

template <class Scale>
void launch_cast_of_matrices(std::span<const CastOf<Scale>> all, Format format, cudaStream_t stream) {
  in_batches(all, [&](const Batch<CastOf<Scale>>& batch, std::span<const CastOf<Scale>> works) {
    const dim3 grid(most(works, [](const CastOf<Scale>& work) { return blocks_of_cast(work.x); }), 1,
                    static_cast<unsigned>(works.size()));
    with_types(format, works[0].x.source, [&]<Format to, class T>(T) {
      launch_kernel(cast_kernel<to, T, Scale>, grid, dim3(kThreads), stream, batch);
    });
  });
}

template <class Scale>
void launch_cast_of_tiles(std::span<const CastOf<Scale>> all, Format format, cudaStream_t stream) {
  in_batches(all, [&](const Batch<CastOf<Scale>>& batch, std::span<const CastOf<Scale>> works) {
    const dim3 grid(most(works, [](const CastOf<Scale>& work) { return blocks_of_tiles(work.x).x; }),
                    most(works, [](const CastOf<Scale>& work) { return blocks_of_tiles(work.x).y; }),
                    static_cast<unsigned>(works.size()));
    with_types(format, works[0].x.source, [&]<Format to, class T>(T) {
      launch_kernel(cast_tiles_kernel<to, T, Scale>, grid, dim3(kThreads), stream, batch);
    });
  });
}

template <class Scale>
void launch_cast_by_matrix(std::span<const CastOf<Scale>> all, Format format, cudaStream_t stream) {
  if (all.empty()) return;
  if (all[0].out.columns)
    launch_cast_of_tiles(all, format, stream);
  else
    launch_cast_of_matrices(all, format, stream);
}

}  // namespace

void launch_cast(std::span<const CastOf<MatrixScale>> all, Format format, cudaStream_t stream) {
  launch_cast_by_matrix(all, format, stream);
}

int64_t parts_of_cast(const CastTiles& out, const Matrix& x) {
  const dim3 tiles = blocks_of_tiles(x);
  return out.columns ? int64_t{tiles.x} * tiles.y : blocks_of_cast(x);
}

void launch_cast_delayed(const CastOf<MatrixScale>& cast, Format format, cudaStream_t stream) {
  const HistoryScale measuring{cast.scale.history.largest, cast.scale.options,
                               const_cast<float*>(cast.scale.magnitudes)};
  const CastOf<HistoryScale> first{cast.x, cast.out, measuring};
  launch_cast_by_matrix(std::span(&first, 1), format, stream);
  launch_cast_by_matrix(std::span(&cast, 1), format, stream);
}

void launch_transpose(std::span<const Transpose> all, cudaStream_t stream) {
  in_batches(all, [&](const Batch<Transpose>& batch, std::span<const Transpose> works) {
    const dim3 grid(most(works, [](const Transpose& work) { return blocks_of_tiles(work.x).x; }),
                    most(works, [](const Transpose& work) { return blocks_of_tiles(work.x).y; }),
                    static_cast<unsigned>(works.size()));
    launch_kernel(transpose_kernel, grid, dim3(kThreads), stream, batch);
  });
}

void launch_cast_columns(std::span<const CastOf<ColumnScales>> all, Format format, cudaStream_t stream) {
  if (!all.empty() && !all[0].scale.scale) launch_scales_of_columns(all, stream);
  launch_cast_of_tiles(all, format, stream);
}

void launch_cast_by_rows(std::span<const CastRows> all, Format format, cudaStream_t stream) {
  in_batches(all, [&](const Batch<CastRows>& batch, std::span<const CastRows> works) {
    const auto blocks = [](const CastRows& work) {
      return blocks_for(work.x.rows * parts_of(work.x.columns, kChunk), kThreads);
    };
    const dim3 grid(most(works, blocks), 1, static_cast<unsigned>(works.size()));
    with_types(format, works[0].x.source, [&]<Format to, class T>(T) {
      launch_kernel(cast_by_rows_kernel<to, T>, grid, dim3(kThreads), stream, batch);
    });
  });
}

// Few thread blocks with many rows each write and read little for their columns, but enough to fill a GPU.
int64_t parts_of_measured_rows(const Matrix& x) {
  return std::min<int64_t>(x.rows, x.columns <= kMaxRowOfRegisters / 2 ? 2 * kMaxParts : kMaxParts);
}

void launch_measured_rows(std::span<const MeasuredRows> all, Format format, const ScaleOptions& options,
                          cudaStream_t stream) {
  in_batches(all, [&](const Batch<MeasuredRows>& batch, std::span<const MeasuredRows> works) {
    const auto threads = [](const MeasuredRows& work) {
      return std::min<int64_t>(parts_of(work.x.columns / kChunk, kWarp) * kWarp, kMaxRowThreads);
    };
    const auto blocks = [](const MeasuredRows& work) {
      return work.magnitudes ? parts_of_measured_rows(work.x) : std::min<int64_t>(work.x.rows, kMaxBlocks);
    };
    const dim3 grid(most(works, blocks), 1, static_cast<unsigned>(works.size()));
    const auto columns = most(works, [](const MeasuredRows& work) { return work.x.columns; });
    with_types(format, works[0].x.source, [&]<Format to, class T>(T) {
      const dim3 block(most(works, threads));
      if (columns <= kMaxRowThreads * kChunk)
        launch_kernel(measured_rows_kernel<to, T, 1>, grid, block, stream, batch, options);
      else
        launch_kernel(measured_rows_kernel<to, T, kMaxRowChunks>, grid, block, stream, batch, options);
    });
  });
}

void launch_scale_sums(void* out, Source to, const Matrix& sums, const SumScales& scales,
                       cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(blocks_for(sums.rows * sums.columns, kThreads * 8));
  with_source(sums.source, [&]<class From>(From) {
    with_source(to, [&]<class To>(To) {
      launch_kernel(scale_sums_kernel<From, To>, dim3(grid), dim3(kThreads), stream, static_cast<To*>(out),
                    static_cast<const From*>(sums.data), scales, sums.rows, sums.columns);
    });
  });
}

const float* one_on_device() {
  void* address = nullptr;
  cudaGetSymbolAddress(&address, static_cast<const void*>(&one));  // callers ask for the last error
  return static_cast<const float*>(address);
}

}  // namespace titan::float8::cuda
