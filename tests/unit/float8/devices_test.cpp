// Each device's kernels equal LibTorch's operations on the CPU bit for bit (except for a NaN's sign and
// digits, which depend on the processor), and its hardware Float8 products equal the emulation within
// rounding. Runs on a GPU if there is one.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>

#include "dist/device_backend.h"
#include "float8/cast.h"
#include "float8/products.h"
#include "titan/ops/linear.h"
#include "unit/golden.h"

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
  // multiples of a warp, a vector load and a tile.
  static std::vector<at::Tensor> matrices(at::ScalarType dtype) {
    std::vector<at::Tensor> result;
    for (const auto& [rows, columns] :
         {std::pair<int64_t, int64_t>{1, 1}, {3, 130}, {19, 33}, {64, 256}, {129, 40}, {257, 1024}})
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
      for (const at::Tensor& x : matrices(from))
        for (const bool transposed : {false, true}) {
          const at::Tensor of_vectors = at::rand({x.size(transposed ? 1 : 0), 1}) * 30 + 0.1;
          for (const at::Tensor& scale : {at::tensor(1.0F), at::tensor(37.25F), at::tensor(0.0F),
                                          at::tensor(std::nanf("")), of_vectors})
            expect_same(cast(there(x), there(scale), to, transposed),
                        composite::cast(x, scale, to, transposed), name_of(x));
        }
}

TEST_P(Float8Device, CastsOfBlocksEqualTheComposition) {
  for (const at::ScalarType from : {at::kFloat, at::kBFloat16})
    for (const at::ScalarType to : kFormats)
      for (const at::Tensor& x : matrices(from))
        for (const bool up : {false, true})
          for (const bool transposed : {false, true}) {
            const auto ours = cast_blocks(there(x), {.dtype = to,
                                                     .rounding = up ? BlockRounding::Up : BlockRounding::Down,
                                                     .transposed = transposed});
            const auto [data, scale] = composite::cast_blocks(x, to, up, transposed);
            expect_same(ours.data, data, name_of(x));
            EXPECT_TRUE(at::equal(ours.scale.cpu().view(at::kByte), scale.view(at::kByte))) << name_of(x);
          }
}

INSTANTIATE_TEST_SUITE_P(All, Float8Device, ::testing::Values("cpu", "cuda"),
                         [](const auto& info) { return std::string(info.param); });

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
