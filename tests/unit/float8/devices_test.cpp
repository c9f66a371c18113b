// Each device's kernels equal LibTorch's operations on the CPU bit for bit (except for a NaN's sign and
// digits, which depend on the processor), and its hardware Float8 products equal the emulation within
// rounding. Runs on a GPU if there is one.

#include <dlfcn.h>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <limits>

#include "dist/device_backend.h"
#include "float8/cast.h"
#include "float8/products.h"
#include "titan/ops/linear.h"
#include "unit/golden.h"
#include "unit/kernel_table.h"

namespace titan::float8 {
namespace {

constexpr at::ScalarType kSources[] = {at::kFloat, at::kBFloat16, at::kHalf};
constexpr at::ScalarType kFormats[] = {at::kFloat8_e4m3fn, at::kFloat8_e5m2};

struct Float8Device : ::testing::TestWithParam<const char*> {
  void SetUp() override {
    at::manual_seed(11);
    if (!device.is_cpu() && !dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  }

  // Every kind of number, on the CPU: denormal, normal, out of range, not finite. Sizes that are and aren't
  // multiples of a warp, a vector load and a tile. Virtual GPUs, which take seconds for the largest, get it for one pair
  // of types.
  static std::vector<at::Tensor> matrices(at::ScalarType dtype, at::ScalarType to = at::kFloat8_e4m3fn) {
    std::vector<std::pair<int64_t, int64_t>> sizes = {{1, 1}, {3, 130}, {19, 33}, {64, 256}, {129, 40}};
    const bool is_virtual = dlsym(RTLD_DEFAULT, "virtual_gpu_count") != nullptr;
    if (!is_virtual || (dtype == at::kBFloat16 && to == at::kFloat8_e4m3fn)) sizes.emplace_back(257, 1024);
    std::vector<at::Tensor> result;
    for (const auto& [rows, columns] : sizes)
      for (const bool finite : {true, false}) {
        const at::Tensor exponents = at::randint(-140, 120, {rows, columns}).to(at::kFloat);
        at::Tensor x = at::randn(exponents.sizes()) * at::exp2(exponents * (finite ? 0.1 : 1));
        if (!finite) {
          x.view(-1)[0] = std::numeric_limits<float>::quiet_NaN();
          x.view(-1)[x.numel() - 1] = -std::numeric_limits<float>::infinity();
        }
        result.push_back(x.to(dtype));
      }
    return result;
  }
  at::Tensor there(const at::Tensor& x) const { return x.to(device); }

  at::Device device = at::Device(GetParam());
};

// Treats all NaNs as equal: their signs and digits depend on the processor.
at::Tensor plain_bytes(const at::Tensor& tensor) {
  const at::Tensor here = tensor.cpu().contiguous();
  const at::Tensor is_nan = at::isnan(here.to(at::kFloat));
  if (here.element_size() == 1) return here.view(at::kByte).masked_fill(is_nan, 0x7f);
  return here.view(at::kInt).masked_fill(is_nan, 0x7fc00000);
}

void expect_same(const at::Tensor& ours, const at::Tensor& wanted, const std::string& what) {
  ASSERT_EQ(ours.sizes(), wanted.sizes()) << what;
  EXPECT_TRUE(at::equal(plain_bytes(ours), plain_bytes(wanted))) << what;
}

std::string name_of(const at::Tensor& x) { return titan::str(x.scalar_type(), " ", x.sizes()); }

TEST_P(Float8Device, AmaxEqualsTheComposition) {
  for (const at::ScalarType from : kSources)
    for (const at::Tensor& x : matrices(from)) {
      expect_same(amax(there(x), Over::Matrix), composite::amax(x, std::nullopt), name_of(x));
      expect_same(amax(there(x), Over::Row), composite::amax(x, 1), name_of(x));
      expect_same(amax(there(x), Over::Column), composite::amax(x, 0), name_of(x));
    }
}

TEST_P(Float8Device, AmaxOfManyEqualsTheComposition) {
  for (const at::ScalarType from : kSources) {
    const std::vector<at::Tensor> xs = matrices(from);
    std::vector<at::Tensor> moved;
    for (const at::Tensor& x : xs) moved.push_back(there(x));
    expect_same(amax_many(moved), composite::amax_many(xs), c10::toString(from));
  }
}

TEST_P(Float8Device, ScalesEqualTheComposition) {
  const float infinity = std::numeric_limits<float>::infinity();
  const at::Tensor magnitudes =
      at::cat({at::tensor({0.0F, 1e-45F, 1e-20F, 1e-12F, 0.3F, 448.0F, 3e38F, infinity, std::nanf("")}),
               at::rand({400}), at::exp2(at::arange(-126, 127).to(at::kFloat))});
  for (const at::ScalarType to : kFormats)
    for (const bool power_of_two : {false, true}) {
      const ops::ScaledMatrix made = scale_and_inverse_of(there(magnitudes), to, power_of_two);
      expect_same(made.inverse, made.scale.cpu().reciprocal(), c10::toString(to));
      expect_same(scale_of(there(magnitudes), to, power_of_two),
                  composite::scale_of(magnitudes, to, power_of_two), c10::toString(to));
      for (const float largest : {0.0F, 2.5F, infinity})
        for (const bool records : {false, true})
          for (const int64_t i : {0, 2, 4, 6, 7, 8}) {
            const at::Tensor pending = at::full({}, 0.2F), history = at::full({}, largest);
            const at::Tensor pending_there = there(pending.clone());
            const DelayedScale scale{there(history), pending_there};
            expect_same(
                delayed_scale(there(magnitudes[i]), scale, to, power_of_two, records),
                composite::delayed_scale(magnitudes[i].clone(), pending, history, to, power_of_two, records),
                titan::str("delayed, ", magnitudes[i].item<float>(), " after ", largest));
            expect_same(pending_there, pending, titan::str("pending, ", magnitudes[i].item<float>()));
          }
    }
}

TEST_P(Float8Device, CastsEqualTheComposition) {
  for (const at::ScalarType from : kSources)
    for (const at::ScalarType to : kFormats)
      for (const at::Tensor& x : matrices(from, to))
        for (const bool transposed : {false, true}) {
          const at::Tensor of_vectors = at::rand({x.size(transposed ? 1 : 0), 1}) * 30 + 0.1;
          for (const at::Tensor& scale : {at::tensor(1.0F), at::tensor(37.25F), at::tensor(0.0F),
                                          at::tensor(std::nanf("")), of_vectors})
            expect_same(cast(there(x), there(scale), to, transposed),
                        composite::cast(x, scale, to, transposed), name_of(x));
        }
}

void expect_inverse(const ops::ScaledMatrix& cast, const std::string& what) {
  if (cast.inverse.defined()) expect_same(cast.inverse, cast.scale.cpu().reciprocal(), what);
}

TEST_P(Float8Device, CastsBothWaysWithOneScaleEqualTheComposition) {
  for (const at::ScalarType from : kSources)
    for (const at::ScalarType to : kFormats)
      for (const at::Tensor& x : matrices(from, to))
        for (const bool power_of_two : {false, true}) {
          const at::Tensor scale = composite::scale_of(composite::amax(x, std::nullopt), to, power_of_two);
          const at::Tensor rows = composite::cast(x, scale, to, false),
                           columns = composite::cast(x, scale, to, true);
          const at::Tensor moved = there(x), parts = magnitudes(moved, Over::Matrix);
          const auto expect_casts = [&](const BothCasts& casts, bool has_rows, bool has_columns) {
            ASSERT_EQ(casts.along_rows.defined(), has_rows);
            ASSERT_EQ(casts.down_columns.defined(), has_columns);
            if (has_rows) expect_same(casts.along_rows.data, rows, name_of(x));
            if (has_columns) expect_same(casts.down_columns.data, columns, name_of(x));
            for (const ops::ScaledMatrix* cast : {&casts.along_rows, &casts.down_columns})
              if (cast->defined()) expect_same(cast->scale, scale, name_of(x));
            expect_inverse(has_rows ? casts.along_rows : casts.down_columns, name_of(x));
          };
          for (const auto& [has_rows, has_columns] : {std::pair{true, true}, {true, false}, {false, true}}) {
            expect_casts(cast_measured(moved, parts, {to, power_of_two}, has_rows, has_columns), has_rows,
                         has_columns);
            expect_casts(cast_scaled(moved, there(scale), to, has_rows, has_columns), has_rows, has_columns);
          }
        }
}

// Also more than one launch takes, and empty ones.
TEST_P(Float8Device, CastsIntoManyPlacesEqualTheComposition) {
  for (const at::ScalarType from : kSources)
    for (const at::ScalarType to : kFormats) {
      std::vector<at::Tensor> xs = matrices(from, to), moved, outs, wanted;
      xs.insert(xs.begin() + 3, at::empty({1, 0}, xs[0].options()));
      const at::Tensor scales = at::rand({static_cast<int64_t>(xs.size())}) * 30 + 0.1;
      for (const at::Tensor& x : xs) {
        moved.push_back(there(x));
        outs.push_back(at::zeros({x.numel()}, moved.back().options().dtype(to)));
        wanted.push_back(at::zeros({x.numel()}, x.options().dtype(to)));
      }
      cast_into_many(outs, moved, there(scales));
      composite::cast_into_many(wanted, xs, scales);
      for (size_t i = 0; i < xs.size(); ++i) expect_same(outs[i], wanted[i], name_of(xs[i]));
    }
}

TEST_P(Float8Device, CastsOfManyEqualTheComposition) {
  for (const at::ScalarType from : kSources)
    for (const at::ScalarType to : kFormats)
      for (const bool by_vector : {false, true})
        for (const bool transposed : {false, true})
          for (const bool power_of_two : {false, true}) {
            if (power_of_two && (from != at::kBFloat16 || transposed))
              continue;  // it concerns the scale alone
            // All four ways for one pair of types. The others have two ways each, so that each format has all four.
            const bool is_mixed = (from == at::kBFloat16) != (to == at::kFloat8_e5m2);
            if ((by_vector != transposed) != is_mixed && (from != at::kBFloat16 || to != at::kFloat8_e4m3fn))
              continue;
            // Rows that a GPU's kernel takes, of several lengths in one launch, or matrices of any size.
            std::vector<at::Tensor> xs, moved;
            for (const at::Tensor& x : matrices(from, to))
              if (!by_vector || x.size(1) % 16 == 0) xs.push_back(x);
            xs.push_back(at::randn({3, 48}).to(from));
            xs.push_back(at::randn({1, 16384}).to(from));
            for (const at::Tensor& x : xs) moved.push_back(there(x));
            const auto [data, scales, inverses] =
                composite::cast_many(xs, {}, to, power_of_two, by_vector, transposed);
            const ManyCasts how{{to, power_of_two}, by_vector, transposed};
            const auto made = cast_many(moved, {}, how);
            const auto repeated = cast_many(moved, made, how);
            ASSERT_EQ(made.size(), xs.size());
            ASSERT_EQ(repeated.size(), xs.size());
            for (size_t i = 0; i < xs.size(); ++i) {
              expect_same(made[i].scale, scales[i], name_of(xs[i]));
              expect_same(made[i].inverse, inverses[i], name_of(xs[i]));
              expect_same(made[i].data, data[i], name_of(xs[i]));
              expect_same(repeated[i].data, data[i], name_of(xs[i]));
              EXPECT_TRUE(repeated[i].scale.is_same(made[i].scale));
            }
          }
}

TEST_P(Float8Device, TransposesEqualTheComposition) {
  std::vector<at::Tensor> xs, moved;
  for (const at::Tensor& x : matrices(at::kBFloat16)) {
    xs.push_back(at::randint(0, 256, x.sizes(), at::kByte));
    moved.push_back(there(xs.back()));
  }
  const std::vector<at::Tensor> transposes = transpose_many(moved);
  for (size_t i = 0; i < xs.size(); ++i)
    EXPECT_TRUE(at::equal(transposes[i].cpu(), xs[i].t())) << name_of(xs[i]);
}

// A history that fits, that is too small, and that is empty.
TEST_P(Float8Device, CastsWithDelayedScalesEqualTheComposition) {
  for (const at::ScalarType from : kSources)
    for (const at::ScalarType to : kFormats)
      for (const at::Tensor& x : matrices(from, to))
        for (const float largest : {0.0F, 1e-3F, 1e30F})
          for (const auto& [rows, columns] : {std::pair{true, true}, {true, false}, {false, true}}) {
            const bool records = rows;
            const at::Tensor history = at::full({}, largest), pending = at::full({}, 0.2F),
                             pending_there = there(pending.clone());
            const auto [along_rows, down_columns, scale, inverse] = composite::cast_delayed(
                x, pending, history, to, /*power_of_two=*/false, records, rows, columns);
            const BothCasts casts = cast_delayed(there(x), {there(history), pending_there}, {.dtype = to},
                                                 records, rows, columns);
            const std::string what = titan::str(name_of(x), " after ", largest);
            expect_same(pending_there, pending, what);
            ASSERT_EQ(casts.along_rows.defined(), rows);
            ASSERT_EQ(casts.down_columns.defined(), columns);
            if (rows) expect_same(casts.along_rows.data, along_rows, what);
            if (columns) expect_same(casts.down_columns.data, down_columns, what);
            const ops::ScaledMatrix& either = rows ? casts.along_rows : casts.down_columns;
            expect_same(either.scale, scale, what);
            expect_inverse(either, what);
          }
}

TEST_P(Float8Device, HistoriesAreUpdatedAsByTheComposition) {
  for (const int64_t steps : {1, 16}) {
    const at::Tensor history = at::rand({300, steps}), pending = at::rand({300}) * 2;
    at::Tensor history_there = there(history.clone()), pending_there = there(pending.clone()),
               largest = at::zeros({300}), largest_there = there(largest.clone());
    pending[7] = 0;
    pending_there[7] = 0;
    const at::Tensor before = history.clone(), found = pending.clone();
    update_histories(history_there, pending_there, largest_there);
    composite::update_histories(history, pending, largest);
    expect_same(history_there, history, "history");
    expect_same(largest_there, largest, "largest");
    expect_same(pending_there, pending, "pending");
    EXPECT_EQ(pending.abs().max().item<float>(), 0.0F);
    const at::Tensor expected = at::cat({found.unsqueeze(1), before.narrow(1, 0, steps - 1)}, 1);
    expect_same(history, expected, "the found magnitude before the older ones");
    expect_same(largest, expected.amax(1), "the largest of a history");
  }
}

TEST_P(Float8Device, CastsOfVectorsEqualTheComposition) {
  for (const at::ScalarType from : kSources)
    for (const at::ScalarType to : kFormats) {
      std::vector<at::Tensor> xs = matrices(from, to);
      if (to == at::kFloat8_e4m3fn) xs.push_back(at::randn({2, 8208}).to(from));  // two chunks in a thread
      for (const at::Tensor& x : xs)
        for (const bool power_of_two : {false, true}) {
          if (power_of_two && from != at::kBFloat16) continue;  // it concerns the scale alone
          const at::Tensor of_rows = composite::scale_of(composite::amax(x, 1), to, power_of_two),
                           of_columns = composite::scale_of(composite::amax(x, 0), to, power_of_two);
          const at::Tensor moved = there(x);
          const MeasuredRows measured = cast_rows(moved, {to, power_of_two}, /*measures_columns=*/true);
          expect_same(measured.along_rows.scale, of_rows, name_of(x));
          expect_same(measured.along_rows.data, composite::cast(x, of_rows, to, false), name_of(x));
          expect_inverse(measured.along_rows, name_of(x));
          for (const at::Tensor& parts : {measured.magnitudes, magnitudes(moved, Over::Column)}) {
            const ops::ScaledMatrix cast = cast_columns(moved, parts, {to, power_of_two});
            expect_same(cast.scale, of_columns, name_of(x));
            expect_same(cast.data, composite::cast(x, of_columns, to, true), name_of(x));
            expect_inverse(cast, name_of(x));
          }
        }
    }
}

struct LaunchCounters {
  void (*start)();
  uint64_t (*count)(const char*, const char*, const char*);
};
// Null on other devices than virtual GPUs.
LaunchCounters launch_counters() {
  return {reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "virtual_gpu_start_counting")),
          reinterpret_cast<uint64_t (*)(const char*, const char*, const char*)>(
              dlsym(RTLD_DEFAULT, "virtual_gpu_count"))};
}

// Units for Float8 keep about 14 bits of a sum of a few products; CPUs and virtual GPUs sum in fp32.
double tolerance_in_fp32(at::Device device) {
  return device.is_cpu() || launch_counters().start ? 1e-6 : 5e-4;
}

// Hardware multiplies them directly, or the sums are scaled afterwards.
TEST_P(Float8Device, ProductsOfVectorsAreNearTheExactOnes) {
  if (!device.is_cpu() && dist::open_cuda_plugin()->compute_capability(0) < 89)
    GTEST_SKIP() << "this GPU has no Float8 units";
  const at::Tensor a = at::randn({48, 64}) * at::exp2(at::arange(48).to(at::kFloat) - 24).unsqueeze(1),
                   b = at::randn({80, 64}) * at::exp2(at::arange(80).to(at::kFloat) / 4).unsqueeze(1);
  const at::Tensor scale_a = composite::scale_of(composite::amax(a, 1), at::kFloat8_e4m3fn, true);
  const at::Tensor a8 = composite::cast(a, scale_a, at::kFloat8_e4m3fn, false);
  for (const bool whole_b : {false, true})
    for (const bool power_of_two : {false, true})
      for (const at::ScalarType to : {at::kFloat, at::kBFloat16}) {
        const at::Tensor amax_b = whole_b ? composite::amax(b, std::nullopt) : composite::amax(b, 1);
        const at::Tensor scale_b = composite::scale_of(amax_b, at::kFloat8_e4m3fn, power_of_two);
        const at::Tensor b8 = composite::cast(b, scale_b, at::kFloat8_e4m3fn, false);
        const at::Tensor wanted = at::mm(a8.to(at::kDouble) / scale_a, (b8.to(at::kDouble) / scale_b).t());
        const at::Tensor out = at::full({48, 80}, std::nan(""), at::TensorOptions(device).dtype(to));
        multiply_vectors(out, {.a_NK = there(a8),
                               .b_MK = there(b8),
                               .inverse_a = there(scale_a.reciprocal()),
                               .inverse_b = there(scale_b.reciprocal()),
                               .power_of_two_scales = power_of_two});
        // Small rows of a matrix that has one scale are zeros in Float8.
        const at::Tensor got = out.cpu().to(at::kDouble), is_zero = wanted.eq(0);
        EXPECT_TRUE(got.masked_select(is_zero).eq(0).all().item<bool>());
        const at::Tensor error = (got / wanted - 1).abs().masked_select(is_zero.logical_not()).median();
        const double tolerance = to == at::kFloat ? tolerance_in_fp32(device) : 4e-3;
        EXPECT_LT(error.item<double>(), tolerance) << to << whole_b << power_of_two;
        EXPECT_LT(testing::relative_error(out.cpu(), wanted), tolerance);
      }
}

TEST_P(Float8Device, CastsOfBlocksEqualTheComposition) {
  for (const at::ScalarType from : {at::kFloat, at::kBFloat16})
    for (const at::ScalarType to : kFormats)
      for (const at::Tensor& x : matrices(from, to))
        for (const bool up : {false, true})
          for (const bool transposed : {false, true})
            for (const bool for_hardware : {false, true}) {
              const auto ours =
                  cast_blocks(there(x), {.dtype = to,
                                         .rounding = up ? BlockRounding::Up : BlockRounding::Down,
                                         .transposed = transposed,
                                         .for_hardware = for_hardware});
              const auto [data, scale] = composite::cast_blocks(x, to, up, transposed, for_hardware);
              expect_same(ours.data, data, name_of(x));
              EXPECT_TRUE(at::equal(ours.scale.cpu().view(at::kByte), scale.view(at::kByte))) << name_of(x);
            }
}

TEST_P(Float8Device, CastsOfBlocksBothWaysEqualTheComposition) {
  for (const at::ScalarType from : {at::kFloat, at::kBFloat16})
    for (const at::ScalarType to : kFormats)
      for (const at::Tensor& x : matrices(from, to))
        for (const bool option :
             {false, true}) {  // for rounding and order; the test above has their other pairs
          const BothCasts ours =
              cast_blocks_both(there(x), {.dtype = to,
                                          .rounding = option ? BlockRounding::Up : BlockRounding::Down,
                                          .for_hardware = option});
          for (const bool transposed : {false, true}) {
            const auto [data, scale] = composite::cast_blocks(x, to, option, transposed, option);
            const ops::ScaledMatrix& cast = transposed ? ours.down_columns : ours.along_rows;
            expect_same(cast.data, data, name_of(x));
            EXPECT_TRUE(at::equal(cast.scale.cpu().view(at::kByte), scale.view(at::kByte))) << name_of(x);
          }
        }
}

INSTANTIATE_TEST_SUITE_P(OnCpu, Float8Device, ::testing::Values("cpu"));
INSTANTIATE_TEST_SUITE_P(OnGpu, Float8Device, ::testing::Values("cuda"));

// As KernelsOnGpu of tests/unit/ops: at most 1.1 times the bytes of inputs and outputs.
TEST(Float8KernelsOnGpu, ReadAndWriteEveryByteOnce) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const auto start = reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "virtual_gpu_start_counting"));
  const auto count = reinterpret_cast<uint64_t (*)(const char*, const char*, const char*)>(
      dlsym(RTLD_DEFAULT, "virtual_gpu_count"));
  if (!start) GTEST_SKIP() << "only virtual GPUs count bytes";
  const at::Tensor x = at::ones({8192, 256}, at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16));
  const auto scale = at::ones({}, x.options().dtype(at::kFloat));
  const auto bytes = static_cast<double>(x.nbytes()), cast_bytes = bytes / 2;
  testing::KernelTable table;
  const auto expect_bytes = [&](const char* kernel, double least, const std::function<void()>& run,
                                uint64_t launches = 1) {
    start();
    run();
    EXPECT_EQ(count("launches", nullptr, nullptr), launches) << kernel;
    table.add(kernel, count, least);
  };
  constexpr auto e4m3 = at::kFloat8_e4m3fn;
  at::Tensor parts, of_columns;
  expect_bytes("magnitudes_kernel", bytes, [&] { parts = magnitudes(x, Over::Matrix); });
  expect_bytes("cast_kernel", bytes + cast_bytes, [&] { cast_measured(x, parts, {}, true, false); });
  expect_bytes("cast_tiles_kernel", bytes + 2 * cast_bytes, [&] { cast_measured(x, parts, {}, true, true); });
  expect_bytes("cast_tiles_kernel", bytes + cast_bytes, [&] { cast_scaled(x, scale, e4m3, false, true); });
  expect_bytes("measured_rows_kernel", bytes + cast_bytes,
               [&] { of_columns = cast_rows(x, {}, /*measures_columns=*/true).magnitudes; });
  expect_bytes(
      "cast_tiles_kernel", bytes + cast_bytes, [&] { cast_columns(x, of_columns, {}); }, 2);
  table.add("scales_of_columns_kernel", count, static_cast<double>(of_columns.nbytes()) + 2 * 4.0 * 256);
  expect_bytes("magnitudes_of_columns_kernel", bytes, [&] { magnitudes(x, Over::Column); });
  // The same for several matrices in one launch.
  const at::Tensor w = at::ones({2048, 256}, x.options());
  const std::vector<at::Tensor> many{x, w, w.clone()};
  const double all = 1.5 * bytes;
  const ManyCasts of_matrices{}, of_rows{.form = {}, .by_vector = true},
      of_columns_of_many{.form = {}, .by_vector = true, .transposed = true};
  std::vector<ops::ScaledMatrix> scales, by_column;
  expect_bytes(
      "magnitudes_kernel", all, [&] { scales = cast_many(many, {}, of_matrices); }, 2);
  expect_bytes("cast_kernel", all + all / 2, [&] { cast_many(many, scales, of_matrices); });
  expect_bytes("cast_tiles_kernel", all + all / 2,
               [&] { cast_many(many, scales, {.form = {}, .transposed = true}); });
  expect_bytes("measured_rows_kernel", all + all / 2, [&] { cast_many(many, {}, of_rows); });
  expect_bytes(
      "magnitudes_of_columns_kernel", all, [&] { by_column = cast_many(many, {}, of_columns_of_many); }, 3);
  expect_bytes("cast_tiles_kernel", all + all / 2, [&] { cast_many(many, by_column, of_columns_of_many); });
  const at::Tensor narrow = cast(x, scale, e4m3, false);
  expect_bytes("transpose_kernel", 2 * cast_bytes, [&] { transpose_many(narrow); });
  // With a history, a matrix is read once. The second launch makes the scale.
  const DelayedScale history{at::ones({}, scale.options()), at::zeros({}, scale.options())};
  expect_bytes(
      "cast_kernel", bytes + cast_bytes, [&] { cast_delayed(x, history, {}, true, true, false); }, 2);
  expect_bytes(
      "cast_tiles_kernel", bytes + 2 * cast_bytes, [&] { cast_delayed(x, history, {}, true, true, true); },
      2);
  expect_bytes("row_blocks_kernel", bytes + cast_bytes + cast_bytes / kBlock,
               [&] { cast_blocks(x, {.for_hardware = true}); });
  expect_bytes("column_blocks_kernel", bytes + cast_bytes + cast_bytes / kBlock,
               [&] { cast_blocks(x, {.transposed = true, .for_hardware = true}); });
  expect_bytes("both_blocks_kernel", bytes + 2 * (cast_bytes + cast_bytes / kBlock),
               [&] { cast_blocks_both(x, {.for_hardware = true}); });
  // Scales that ranks have to agree on.
  const double row_scales = 4 * 8192;
  at::Tensor of_rows_amax;
  expect_bytes("amax_of_rows_kernel", bytes + row_scales, [&] { of_rows_amax = amax(x, Over::Row); });
  expect_bytes("cast_by_rows_kernel", bytes + cast_bytes + row_scales,
               [&] { cast(x, of_rows_amax, e4m3, false); });
  expect_bytes("scale_kernel", 3 * row_scales,
               [&] { scale_and_inverse_of(of_rows_amax, e4m3, /*power_of_two=*/false); });
  expect_bytes("delayed_scale_kernel", static_cast<double>(parts.nbytes()) + 3 * 4.0,
               [&] { delayed_scale(parts, history, e4m3, /*power_of_two=*/false, /*records=*/true); });
  expect_bytes(
      "amax_of_many_kernel", all, [&] { amax_many(many); }, 2);  // zeros first
  const at::Tensor histories = at::ones({4096, 16}, scale.options());
  const at::Tensor pending = at::ones({4096}, scale.options()), largest = pending.clone();
  expect_bytes("update_histories_kernel", 4.0 * 4096 * (2 * 16 + 2),
               [&] { update_histories(histories, pending, largest); });
  table.expect_equals_docs();
}

// Scales come with their inverses. Where cuBLASLt has no product of vectors, the sums are scaled by one more launch.
TEST(Float8KernelsOnGpu, ScalesAndProductsOfVectorsTakeNoOtherLaunches) {
  dist::DeviceBackend* backend = dist::open_cuda_plugin();
  if (!backend) GTEST_SKIP() << "no GPU is visible";
  const auto [start, count] = launch_counters();
  if (!start) GTEST_SKIP() << "only virtual GPUs count launches";
  const at::Tensor amax = at::rand({512, 1}, at::TensorOptions(at::kCUDA));
  start();
  const ops::ScaledMatrix made = scale_and_inverse_of(amax, at::kFloat8_e4m3fn, /*power_of_two=*/true);
  EXPECT_EQ(count("launches", nullptr, nullptr), 1u);
  const at::Tensor a = cast(at::randn({512, 64}, amax.options()), made.scale, at::kFloat8_e4m3fn, false);
  const at::Tensor out = at::empty({512, 512}, amax.options());
  const int capability = backend->compute_capability(0);
  if (capability < 89) GTEST_SKIP() << "this GPU has no Float8 units";
  start();
  multiply_vectors(out, {.a_NK = a, .b_MK = a, .inverse_a = made.inverse, .inverse_b = made.inverse});
  if (capability / 10 == 9) {
    EXPECT_EQ(count("launches", nullptr, nullptr), 1u);
    return;
  }
  EXPECT_EQ(count("launches", nullptr, nullptr), 2u);
  testing::KernelTable table;
  table.add("scale_sums_kernel", count, static_cast<double>(2 * out.nbytes() + made.inverse.nbytes()));
  table.expect_equals_docs();
}

// A rank's part of several sequences has gaps between them. With a long inner dimension, a product for each would take longer than a copy.
TEST(Float8KernelsOnGpu, WriteToAPlaceWithGaps) {
  dist::DeviceBackend* backend = dist::open_cuda_plugin();
  if (!backend || backend->compute_capability(0) < 89) GTEST_SKIP() << "no GPU with Float8 units is visible";
  constexpr int64_t batch = 2, part = 64, features = 4096;
  const at::TensorOptions bf16 = at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16);
  for (const char* recipe : {"tensorwise", "rowwise"}) {
    const auto each = products(recipes().get(recipe), Arithmetic::Hardware, ops::default_products());
    const auto put = [&](ops::Pass pass, int64_t inner) {
      SCOPED_TRACE(inner);
      const bool forward = pass == ops::Pass::Forward;
      const at::Tensor rows = at::randn({batch * part, inner}, bf16);
      const at::Tensor weight =
          at::randn({forward ? features : inner, forward ? inner : features}, bf16).mul_(0.1);
      const at::Tensor whole = at::full({batch, 3 * part, features}, 9, bf16);
      at::Tensor expected = whole.clone();
      const at::Tensor product = forward ? each->forward(rows, weight) : each->grad_input(rows, weight);
      expected.narrow(1, part, part).copy_(product.view({batch, part, features}));
      const bool is_put = each->put_product(whole.narrow(1, part, part), pass, rows, weight);
      if (is_put) EXPECT_CLOSE(whole.cpu(), expected.cpu(), 1e-2);
      return is_put;
    };
    for (const ops::Pass pass : {ops::Pass::Forward, ops::Pass::Backward}) {
      SCOPED_TRACE(str(recipe, ", pass ", static_cast<int>(pass)));
      EXPECT_TRUE(put(pass, 16));
      EXPECT_FALSE(put(pass, 256));
    }
  }
}

// Three layers over one input: w1, w3, and one more. An inverse that isn't kept would be one more for each layer.
TEST(Float8KernelsOnGpu, LayersOverOneInputCastTheirWeightsTogether) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const auto [start, count] = launch_counters();
  if (!start) GTEST_SKIP() << "only virtual GPUs count launches";
  const at::TensorOptions bf16 = at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16);
  const at::Tensor x = at::randn({64, 64}, bf16).requires_grad_();
  std::vector<ops::SinkedWeight> weights;
  for (const int64_t features : {32, 64, 96})
    weights.emplace_back((at::randn({features, 64}) * 0.1).to(bf16).requires_grad_());
  struct Counts {
    uint64_t forward, backward;
  };
  const auto counts_of = [&](const char* recipe) {
    const auto first = products(recipes().get(recipe), Arithmetic::Hardware, ops::default_products());
    std::vector<ops::SharedProducts> each;
    for (size_t i = 0; i < weights.size(); ++i) each.push_back(first->for_parts({}));
    start();
    const std::vector<at::Tensor> outputs = ops::joint_linears(x, weights, each);
    Counts counts{count("launches", nullptr, nullptr), 0};
    std::vector<at::Tensor> grads, inputs{x};
    for (const at::Tensor& y : outputs) grads.push_back(at::ones_like(y));
    for (const auto& weight : weights) inputs.push_back(weight.weight);
    start();
    const std::vector<at::Tensor> found = torch::autograd::grad(outputs, inputs, grads);
    counts.backward = count("launches", nullptr, nullptr);
    at::Tensor sum = at::zeros(x.sizes(), x.options().dtype(at::kFloat));
    for (size_t i = 0; i < weights.size(); ++i) {
      const at::Tensor y = ops::linear(x, weights[i].weight, {}, each[i]);
      sum += torch::autograd::grad({y}, {x}, {grads[i]})[0];
    }
    EXPECT_LT(testing::relative_error(found[0].cpu(), sum.cpu()), 4e-3) << recipe;
    return counts;
  };
  const Counts tensorwise = counts_of("tensorwise"), rowwise = counts_of("rowwise");
  // Two for the input, two for the weights, three products.
  EXPECT_EQ(tensorwise.forward, 2 + 2 + 3u);
  // One for the weights; for each layer two for its gradient, two products, which add to the input's gradient themselves.
  EXPECT_EQ(tensorwise.backward, 1 + 3 * (2 + 2u));
  // By rows, weights are measured and cast at once, and there is one more for the scales of columns.
  EXPECT_EQ(rowwise.forward, 3 + 1 + 3u);
  EXPECT_EQ(rowwise.backward, 3 + 3 * (3 + 2u));
}

// Their scales need no operations before the product.
TEST(Float8KernelsOnGpu, LayersWithMxfp8CastInTheHardwaresOrder) {
  dist::DeviceBackend* backend = dist::open_cuda_plugin();
  if (!backend) GTEST_SKIP() << "no GPU is visible";
  const auto [start, count] = launch_counters();
  if (!start) GTEST_SKIP() << "only virtual GPUs count launches";
  if (backend->compute_capability(0) < 100) GTEST_SKIP() << "this GPU has no MXFP8";
  const at::TensorOptions bf16 = at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16);
  const at::Tensor x = at::randn({128, 128}, bf16).requires_grad_(),
                   weight = at::randn({256, 128}, bf16).requires_grad_();
  const auto scaled = products(recipes().get("mxfp8_cublas"), Arithmetic::Hardware, ops::default_products());
  start();
  const at::Tensor y = ops::linear(x, weight, {}, scaled);
  EXPECT_EQ(count("launches", nullptr, nullptr), 2 + 1u);  // x both ways at once, the weight, and the product
  const at::Tensor grad = at::ones_like(y);
  start();
  torch::autograd::grad({y}, {x, weight}, {grad});
  EXPECT_EQ(count("launches", nullptr, nullptr), 2 + 2u);
}

// One launch, also for a length that isn't a multiple of 16. In fp32, a product that adds rounds once where a product and an addition round twice.
TEST(Float8ProductsOnGpu, AddToASum) {
  dist::DeviceBackend* backend = dist::open_cuda_plugin();
  if (!backend) GTEST_SKIP() << "no GPU is visible";
  if (backend->compute_capability(0) < 89) GTEST_SKIP() << "this GPU has no products in Float8";
  const auto [start, count] = launch_counters();
  const auto check = [&, &start = start, &count = count](at::ScalarType dtype, int64_t length, Over over) {
    SCOPED_TRACE(str(c10::toString(dtype), ", length ", length, over == Over::Row ? ", by vector" : ""));
    const at::Tensor a = at::randn({32, length}), b = at::randn({48, length}),
                     sum = at::randn({32, 48}).to(dtype);
    const auto there = [&](const at::Tensor& x, at::ScalarType to) -> ops::ScaledMatrix {
      const ops::ScaledMatrix scale = scale_and_inverse_of(amax(x, over), to, false);
      return {cast(x, scale.scale, to, false).cuda(), scale.scale.cuda(), scale.inverse.cuda()};
    };
    const ops::ScaledMatrix left = there(a, at::kFloat8_e5m2), right = there(b, at::kFloat8_e4m3fn);
    const auto here = [](const ops::ScaledMatrix& x) { return x.data.cpu().to(at::kDouble) / x.scale.cpu(); };
    const at::Tensor expected = sum.to(at::kDouble) + here(left).mm(here(right).t());
    const at::Tensor out = sum.cuda();
    if (start) start();
    add_hardware_product(out, left, right, {.out_dtype = dtype});
    // Elsewhere a product of vectors has its sums scaled and then added.
    const bool adds_itself = over == Over::Matrix || backend->compute_capability(0) / 10 == 9;
    if (start && length % 16 == 0) EXPECT_EQ(count("launches", nullptr, nullptr), adds_itself ? 1U : 3U);
    const double error = (out.cpu().to(at::kDouble) - expected).abs().max().item<double>();
    const double tolerance = dtype == at::kFloat ? 2 * tolerance_in_fp32(at::kCUDA) : 8e-3;
    EXPECT_LE(error, tolerance * expected.abs().max().item<double>());
  };
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const int64_t length : {64, 40})
      for (const Over over : {Over::Matrix, Over::Row}) check(dtype, length, over);
}

// Or are put into a place of their own, in one launch.
TEST(Float8ProductsOnGpu, OfMxfp8BlocksAddToASum) {
  dist::DeviceBackend* backend = dist::open_cuda_plugin();
  if (!backend) GTEST_SKIP() << "no GPU is visible";
  if (backend->compute_capability(0) < 100) GTEST_SKIP() << "this GPU has no products of blocks";
  const auto [start, count] = launch_counters();
  const at::Tensor a = at::randn({32, 64}), b = at::randn({48, 64});
  const auto there = [](const at::Tensor& x) {
    return cast_blocks(x.cuda(), {.dtype = at::kFloat8_e4m3fn, .for_hardware = true});
  };
  const auto here = [](const at::Tensor& x) {
    return block_values(cast_blocks(x, {.dtype = at::kFloat8_e4m3fn})).to(at::kDouble);
  };
  const ops::ScaledMatrix left = there(a), right = there(b);
  const at::Tensor product = here(a).mm(here(b).t());
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const bool adds : {false, true}) {
      const at::Tensor sum = at::randn({32, 48}).to(dtype), out = sum.cuda();
      if (start) start();
      if (adds)
        add_hardware_product(out, left, right, {.out_dtype = dtype});
      else
        put_hardware_product(out, left, right, {.out_dtype = dtype});
      if (start) EXPECT_EQ(count("launches", nullptr, nullptr), 1U);
      const at::Tensor expected = adds ? sum.to(at::kDouble) + product : product;
      const double error = (out.cpu().to(at::kDouble) - expected).abs().max().item<double>();
      const double tolerance = dtype == at::kFloat ? 2 * tolerance_in_fp32(at::kCUDA) : 8e-3;
      EXPECT_LE(error, tolerance * expected.abs().max().item<double>()) << dtype << adds;
    }
}

struct RecipeOnGpu : ::testing::TestWithParam<const char*> {};

// Output and both gradients.
std::vector<at::Tensor> results_of(const char* recipe, Arithmetic arithmetic, at::Device device) {
  at::manual_seed(12);
  const at::Tensor x = at::randn({48, 64}).to(device, at::kBFloat16).requires_grad_();
  const at::Tensor weight = (at::randn({96, 64}) * 0.05).to(device, at::kBFloat16).requires_grad_();
  const at::Tensor grad = at::randn({48, 96}).to(device, at::kBFloat16);
  const auto scaled = products(recipes().get(recipe), arithmetic, ops::default_products());
  const at::Tensor y = ops::linear(x, weight, {}, scaled);
  std::vector<at::Tensor> results = torch::autograd::grad({y}, {x, weight}, {grad});
  results.push_back(y.detach());
  for (at::Tensor& result : results) result = result.cpu();
  return results;
}

void expect_near_emulation(const char* recipe, Arithmetic arithmetic, at::Device device) {
  const auto wanted = results_of(recipe, Arithmetic::Emulated, at::kCPU);
  const auto found = results_of(recipe, arithmetic, device);
  for (size_t i = 0; i < wanted.size(); ++i)
    EXPECT_LT(testing::relative_error(found[i], wanted[i]), 4e-3) << i;
}

TEST_P(RecipeOnGpu, HardwareAndEmulationEqualTheCpu) {
  dist::DeviceBackend* backend = dist::open_cuda_plugin();
  if (!backend) GTEST_SKIP() << "no GPU is visible";
  const at::Device device(at::kCUDA, 0);
  expect_near_emulation(GetParam(), Arithmetic::Emulated, device);
  if (backend->compute_capability(0) < first_capability(recipes().get(GetParam())))
    GTEST_SKIP() << "this GPU can't run the recipe";
  expect_near_emulation(GetParam(), Arithmetic::Hardware, device);
}

// Checks the comparison itself without a GPU: a CPU has a product with one scale per matrix.
TEST(RecipeOnCpu, ProductEqualsTheEmulation) {
  expect_near_emulation("tensorwise", Arithmetic::Hardware, at::kCPU);
}

INSTANTIATE_TEST_SUITE_P(All, RecipeOnGpu,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8_cublas",
                                           "mxfp8_cublas_rceil"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace titan::float8
