// The functions that launch LibTitan's kernels, on a planned device: they count the launch, and the bytes that the kernel reads and
// writes, each once. The plugin's own, in src/cuda_plugin/*.cu, have the same names, so these are hidden from other libraries.

#include <algorithm>
#include <span>

#include "ops/adam_formula.h"
#include "plan/gpu/planned_gpu.h"

#pragma GCC visibility push(hidden)
#include "cuda_plugin/adam_kernels.h"
#include "cuda_plugin/float8_kernels.h"
#include "cuda_plugin/ops_kernels.h"
#pragma GCC visibility pop

namespace titan {

namespace {

double size_of(cuda::Source source) { return source == cuda::Source::Float ? 4 : 2; }

void count(const char* kernel, double bytes_read, double bytes_written) {
  plan::PlannedGpu::get().launch({.name = kernel, .bytes_read = bytes_read, .bytes_written = bytes_written});
}

int64_t parts_of(int64_t count, int64_t each) { return (count + each - 1) / each; }

}  // namespace

namespace ops::cuda {

namespace {

double bytes_of(const NormRows& in) { return static_cast<double>(in.rows * in.size) * size_of(in.source); }
double weight_bytes(const NormRows& in) { return static_cast<double>(in.size) * size_of(in.source); }
double bytes_of(const GateAndUp& in) { return static_cast<double>(in.count) * size_of(in.source); }
double bytes_of(const LogitRows& in) {
  return static_cast<double>(in.rows * in.columns) * size_of(in.source);
}

}  // namespace

void launch_rms_norm(void*, float*, const NormRows& in, float, cudaStream_t) {
  count("rms_norm_kernel", bytes_of(in) + weight_bytes(in),
        bytes_of(in) + 4.0 * static_cast<double>(in.rows));
}

void launch_add_rms_norm(void*, float*, void*, const void*, const NormRows& in, float, cudaStream_t) {
  count("add_rms_norm_kernel", 2 * bytes_of(in) + weight_bytes(in),
        2 * bytes_of(in) + 4.0 * static_cast<double>(in.rows));
}

void launch_rms_norm_backward(const NormGradients& out, const void*, const void* added, const NormRows& in,
                              const float*, cudaStream_t) {
  const double parts = 4.0 * static_cast<double>(out.num_parts * in.size);
  count("rms_norm_backward_kernel",
        (added ? 3 : 2) * bytes_of(in) + weight_bytes(in) + 4.0 * static_cast<double>(in.rows),
        bytes_of(in) + parts);
  count("sum_of_rows_kernel", parts, 4.0 * static_cast<double>(in.size));
}

void launch_rotary(const Rotation& in, cudaStream_t) {
  const double bytes =
      static_cast<double>(in.tokens * (in.first.heads + in.second.heads) * in.size) * size_of(in.source);
  const double table = 4.0 * static_cast<double>(std::min(in.num_positions, in.table_rows) * in.size);
  count("rotary_kernel", bytes + table + (in.positions ? 8.0 * static_cast<double>(in.num_positions) : 0),
        bytes);
}

void launch_swiglu(void*, const GateAndUp& in, cudaStream_t) {
  count("swiglu_kernel", 2 * bytes_of(in), bytes_of(in));
}

void launch_swiglu_backward(const SwigluGradients& to, const void*, const GateAndUp& in, cudaStream_t) {
  count("swiglu_backward_kernel", 3 * bytes_of(in), (to.out ? 3 : 2) * bytes_of(in));
}

void launch_merge_attention(const AttentionPart& in, cudaStream_t) {
  const auto rows = static_cast<double>(in.batch * in.tokens * in.heads);
  const double elements = rows * static_cast<double>(in.size);
  count("merge_attention_kernel", elements * (4 + size_of(in.source)) + 8 * rows, 4 * elements + 4 * rows);
}

void launch_sum_of_parts(const SumOfParts& in, cudaStream_t) {
  const double bytes = static_cast<double>(in.size) * size_of(in.source);
  count("sum_of_parts_kernel", in.num_parts * bytes, bytes);
}

void launch_cross_entropy(double*, const LogitRows& in, bool with_grad, cudaStream_t) {
  const double numbers = 8.0 * static_cast<double>(in.rows);
  count("cross_entropy_kernel", bytes_of(in) + numbers, (with_grad ? bytes_of(in) : 0) + numbers);
}

void launch_vocabulary_stats(double*, double*, const LogitRows& in, cudaStream_t) {
  const double numbers = 8.0 * static_cast<double>(in.rows);
  count("vocabulary_stats_kernel", bytes_of(in) + numbers, 2 * numbers);
}

void launch_vocabulary_grad(const LogitRows& in, const double*, const GradientFactors& factors,
                            cudaStream_t) {
  const double numbers = 8.0 * static_cast<double>(in.rows);
  count("vocabulary_grad_kernel", bytes_of(in) + (factors.by_softmax ? 5 : 2) * numbers, bytes_of(in));
}

void launch_adam(AdamTensors in, AdamSources sources, const adam::Rule&, const double*, const float*,
                 const float*, cudaStream_t) {
  double elements = 0;
  for (int i = 0; i < in.num_tensors; ++i) elements += static_cast<double>(in.tensors[i].count);
  const double param = size_of(sources.param), state = size_of(sources.state);
  count("adam_kernel", elements * (2 * param + 2 * state), elements * (param + 2 * state));
}

}  // namespace ops::cuda

namespace float8::cuda {

namespace {

// As in src/cuda_plugin/float8_numbers.h and float8_casts.cu, whose grids follow from these.
constexpr int64_t kThreads = 256, kMaxBlocks = 4096, kMaxGrid = 65535, kMaxParts = 256, kTile = 128,
                  kChunk = 16;

double elements_of(const Matrix& x) { return static_cast<double>(x.rows * x.columns); }
double bytes_of(const Matrix& x) { return elements_of(x) * size_of(x.source); }

// Counts a launch for each kMaxMatrices works; `read` and `written` give a work's bytes.
template <class Work, class Read, class Written>
void count_batches(const char* kernel, std::span<const Work> all, Read read, Written written) {
  for (size_t first = 0; first < all.size(); first += kMaxMatrices) {
    double bytes_read = 0, bytes_written = 0;
    for (const Work& work : all.subspan(first, std::min<size_t>(kMaxMatrices, all.size() - first))) {
      bytes_read += read(work);
      bytes_written += written(work);
    }
    count(kernel, bytes_read, bytes_written);
  }
}

template <class Work>
double read_by(const Work& work) {
  return bytes_of(work.x);
}

double written_by(const CastTiles& out, const Matrix& x) {
  return ((out.rows ? 1 : 0) + (out.columns ? 1 : 0)) * elements_of(x);
}

template <class Scale>
void count_casts(std::span<const CastOf<Scale>> all, bool by_tiles) {
  if (all.empty()) return;
  count_batches(by_tiles ? "cast_tiles_kernel" : "cast_kernel", all, read_by<CastOf<Scale>>,
                [](const CastOf<Scale>& work) { return written_by(work.out, work.x); });
}

}  // namespace

int64_t parts_of_matrix(const Matrix& x) {
  return std::min<int64_t>(parts_of(x.rows * x.columns, kThreads * 32), 1024);
}

int64_t parts_of_columns(const Matrix& x) {
  return parts_of(x.rows, std::max<int64_t>(parts_of(x.rows, kMaxParts), 256));
}

int64_t parts_of_cast(const CastTiles& out, const Matrix& x) {
  if (!out.columns)
    return std::clamp<int64_t>(parts_of(x.rows * x.columns, kThreads * kChunk), 1, kMaxBlocks);
  const int64_t strips = std::min(parts_of(x.columns, kTile), kMaxGrid), tiles = parts_of(x.rows, kTile);
  return std::min(tiles, std::max<int64_t>(kMaxBlocks / 4 / strips, 1)) * strips;
}

int64_t parts_of_measured_rows(const Matrix& x) {
  return std::min<int64_t>(x.rows, x.columns <= kMaxRowOfRegisters / 2 ? 2 * kMaxParts : kMaxParts);
}

ScaleOptions scale_options(double largest, bool power_of_two) {
  return {.largest = static_cast<float>(largest),
          .scale_of_least = static_cast<float>(largest / 1e-12),
          .power_of_two = power_of_two};
}

void launch_magnitudes(std::span<const Measurement> all, cudaStream_t) {
  count_batches("magnitudes_kernel", all, read_by<Measurement>,
                [](const Measurement& work) { return 4.0 * static_cast<double>(parts_of_matrix(work.x)); });
}

void launch_magnitudes_of_columns(std::span<const Measurement> all, cudaStream_t) {
  count_batches("magnitudes_of_columns_kernel", all, read_by<Measurement>, [](const Measurement& work) {
    return size_of(work.x.source) * static_cast<double>(parts_of_columns(work.x) * work.x.columns);
  });
}

void launch_amax_of_rows(float*, const Matrix& x, cudaStream_t) {
  count("amax_of_rows_kernel", bytes_of(x), 4.0 * static_cast<double>(x.rows));
}

void launch_amax_of_many(std::span<const Measurement> all, cudaStream_t) {
  count_batches("amax_of_many_kernel", all, read_by<Measurement>, [](const Measurement&) { return 4.0; });
}

void launch_scale(float*, float*, const float*, int64_t number, const ScaleOptions&, cudaStream_t) {
  count("scale_kernel", 4.0 * static_cast<double>(number), 8.0 * static_cast<double>(number));
}

void launch_delayed_scale(const MatrixScale& scale, cudaStream_t) {
  count("delayed_scale_kernel", 4.0 * static_cast<double>(scale.count), 4);
}

void launch_update_histories(const Histories& histories, cudaStream_t) {
  const double bytes = 4.0 * static_cast<double>(histories.rows * histories.steps);
  count("update_histories_kernel", bytes, bytes);
}

void launch_cast(std::span<const CastOf<MatrixScale>> all, Format, cudaStream_t) {
  count_casts(all, !all.empty() && all[0].out.columns);
}

void launch_cast_delayed(const CastOf<MatrixScale>& cast, Format, cudaStream_t) {
  for (int pass = 0; pass < 2; ++pass)
    count_casts(std::span<const CastOf<MatrixScale>>(&cast, 1), cast.out.columns != nullptr);
}

void launch_cast_by_rows(std::span<const CastRows> all, Format, cudaStream_t) {
  count_batches("cast_by_rows_kernel", all, read_by<CastRows>,
                [](const CastRows& work) { return elements_of(work.x); });
}

void launch_cast_columns(std::span<const CastOf<ColumnScales>> all, Format, cudaStream_t) {
  if (!all.empty() && !all[0].scale.scale)
    count_batches(
        "scales_of_columns_kernel", all,
        [](const CastOf<ColumnScales>& work) {
          return size_of(work.x.source) * static_cast<double>(work.scale.count * work.x.columns);
        },
        [](const CastOf<ColumnScales>& work) { return 8.0 * static_cast<double>(work.x.columns); });
  count_casts(all, /*by_tiles=*/true);
}

void launch_measured_rows(std::span<const MeasuredRows> all, Format, const ScaleOptions&, cudaStream_t) {
  count_batches("measured_rows_kernel", all, read_by<MeasuredRows>, [](const MeasuredRows& work) {
    const auto magnitudes = static_cast<double>(parts_of_measured_rows(work.x) * work.x.columns);
    return elements_of(work.x) + (work.magnitudes ? size_of(work.x.source) * magnitudes : 0);
  });
}

void launch_transpose(std::span<const Transpose> all, cudaStream_t) {
  count_batches(
      "transpose_kernel", all, [](const Transpose& work) { return elements_of(work.x); },
      [](const Transpose& work) { return elements_of(work.x); });
}

// Nothing reads it.
const float* one_on_device() {
  static float one = 1;
  return &one;
}

void launch_scale_sums(void*, Source to, const Matrix& sums, const SumScales&, cudaStream_t) {
  count("scale_sums_kernel", bytes_of(sums), elements_of(sums) * size_of(to));
}

bool put_product(const Product& product, cudaStream_t) {
  const double rows = static_cast<double>(product.rows), columns = static_cast<double>(product.columns),
               length = static_cast<double>(product.length),
               of_out = rows * columns * size_of(product.source),
               of_scales = product.factors == Product::Factors::OfBlocks    ? (rows + columns) * length / 32
                           : product.factors == Product::Factors::OfVectors ? (rows + columns) * 4
                                                                            : 0;
  plan::PlannedGpu::get().take_workspaces(/*is_scaled_product=*/true);
  plan::PlannedGpu::get().launch(
      {.name = product.adds ? plan::kAddedProduct : "aten::_scaled_mm",
       .flops = 2 * rows * columns * length,
       .bytes_read = (rows + columns) * length + of_scales + (product.adds ? of_out : 0),
       .bytes_written = of_out,
       .dtype = at::kFloat8_e4m3fn,
       .shape = {1, product.rows, product.columns, product.length}});
  return true;
}

void launch_cast_row_blocks(const CastBlocks&, const Matrix& x, const BlockOptions&, cudaStream_t) {
  count("row_blocks_kernel", bytes_of(x), elements_of(x) * 33 / 32);
}

void launch_cast_column_blocks(const CastBlocks&, const Matrix& x, const BlockOptions&, cudaStream_t) {
  count("column_blocks_kernel", bytes_of(x), elements_of(x) * 33 / 32);
}

void launch_cast_both_blocks(const CastBlocks&, const CastBlocks&, const Matrix& x, const BlockOptions&,
                             cudaStream_t) {
  count("both_blocks_kernel", bytes_of(x), elements_of(x) * 33 / 16);
}

}  // namespace float8::cuda

}  // namespace titan
