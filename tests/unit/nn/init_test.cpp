#include "titan/nn/hooks.h"

#include <ATen/ATen.h>
#include <algorithm>

#include <gtest/gtest.h>

#include "nn/random_block.h"
#include "titan/core/error.h"

namespace titan::nn {
namespace {

Box whole_box(at::IntArrayRef shape) { return {std::vector<int64_t>(shape.size(), 0), shape.vec()}; }

at::Tensor draw(const Init& init, at::IntArrayRef shape, const Box& box, at::ScalarType dtype = at::kFloat,
                uint64_t seed = 7, const char* name = "layers.3.attention.wq.weight") {
  at::Tensor local = at::empty(box.length, dtype);
  fill(local, init, {seed, name}, shape, box);
  return local;
}

at::Tensor part(at::Tensor whole, const Box& box) {
  for (size_t dim = 0; dim < box.offset.size(); ++dim)
    whole = whole.narrow(static_cast<int64_t>(dim), box.offset[dim], box.length[dim]);
  return whole.contiguous();
}

using PhiloxBlock = std::array<uint32_t, 4>;

// The definition for one counter, which all kernels must match.
PhiloxBlock philox4x32_10(PhiloxBlock counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMul0} * counter[0],
                   product1 = uint64_t{kPhiloxMul1} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key[0] += kPhiloxWeyl0;
    key[1] += kPhiloxWeyl1;
  }
  return counter;
}

// The known answers of Random123's kat_vectors.
TEST(Philox, GivesTheKnownAnswers) {
  EXPECT_EQ(philox4x32_10({0, 0, 0, 0}, {0, 0}),
            (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32_10({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(InverseNormal, IsPreciseInCenterFlanksAndTails) {
  EXPECT_EQ(inverse_normal(0.5), 0);
  EXPECT_NEAR(inverse_normal(0.975), 1.959963984540054235, 1e-15);
  EXPECT_NEAR(inverse_normal(0.25), -0.674489750196081743, 1e-15);
  EXPECT_NEAR(inverse_normal(1e-10), -6.361340902404056, 1e-14);
  EXPECT_NEAR(inverse_normal(1e-300), -37.0470962993612, 1e-13);
  for (double p = 1e-14; p < 0.5; p *= 1.37) {
    EXPECT_NEAR(0.5 * std::erfc(-inverse_normal(p) / std::sqrt(2.0)) / p, 1, 1e-13) << p;
    // 1 - p is rounded by up to 2^-54, which moves the result by that over the density.
    const double z = inverse_normal(p), density = std::exp(-z * z / 2) / std::sqrt(2 * M_PI);
    EXPECT_NEAR(inverse_normal(1 - p), -z, 0x1p-53 / density + 1e-14) << p;
  }
}

TEST(InverseNormal, HasAPreciseLogarithm) {
  for (double x = 1e-300; x < 1e300; x *= 1.7)
    EXPECT_NEAR(fixed_log(x), std::log(x), 2.3e-16 * std::abs(std::log(x))) << x;
  EXPECT_EQ(fixed_log(1.0), 0);
}

TEST(InverseNormal, AgreesWithItsDistribution) {
  EXPECT_EQ(normal_distribution(0), 0.5);
  EXPECT_NEAR(normal_distribution(-3), 0.00134989803163009453, 1e-17);
  EXPECT_NEAR(normal_distribution(1.5), 0.933192798731141934, 1e-15);
  EXPECT_EQ(normal_distribution(-100), 0);
  EXPECT_EQ(normal_distribution(100), 1);
}

std::vector<DrawLanes> lanes_here() {
  std::vector<DrawLanes> lanes = {DrawLanes::Portable};
  if (best_draw_lanes() >= DrawLanes::Avx2) lanes.push_back(DrawLanes::Avx2);
  if (best_draw_lanes() >= DrawLanes::Avx512) lanes.push_back(DrawLanes::Avx512);
  return lanes;
}

TEST(InverseNormal, GivesTheSameBitsInBlocks) {
  std::vector<double> p{0x1p-53, 1 - 0x1p-53, 1e-300, 1e-12, 1 - 1e-12, 0.5, 0.075, 0.925};
  for (double x = 1e-9; x < 1; x += 3.1e-4) p.push_back(x);
  for (double x = 0.01; x > 1e-200; x *= 0.9) p.push_back(x);  // fills a block with tails only
  for (const DrawLanes lanes : lanes_here())
    for (size_t count : {p.size(), size_t{1}, size_t{7}}) {
      std::vector<double> z(p.begin(), p.begin() + static_cast<std::ptrdiff_t>(count));
      draw_normals(z.data(), static_cast<int64_t>(count), {}, lanes);
      for (size_t i = 0; i < count; ++i) EXPECT_EQ(z[i], inverse_normal(p[i])) << p[i];
    }
}

// All probabilities are outside the center, including those in lanes past the last element.
TEST(InverseNormal, WritesNothingAfterABlock) {
  const NormalDraw draw{.offset = 0.95, .scale = 0.05, .mean = 1, .std = 2, .low = 4.5, .high = 5};
  for (const DrawLanes lanes : lanes_here())
    for (const int64_t count : {1, 2, 3, 5, 6, 7, 9, 243, 247, 248, 249}) {
      std::vector<double> z(static_cast<size_t>(count) + 8, 0.25);
      draw_normals(z.data(), count, draw, lanes);
      const double value = std::clamp(1 + 2 * inverse_normal(0.95 + 0.05 * 0.25), 4.5, 5.0);
      for (size_t i = 0; i < z.size(); ++i)
        EXPECT_EQ(z[i], static_cast<int64_t>(i) < count ? value : 0.25) << i;
    }
}

TEST(RandomStream, GivesTheUniformsOfPhilox) {
  const uint64_t seed = 0x123456789abcdef0, name = 0xfedcba9876543210;
  for (uint64_t first :
       {uint64_t{0}, (uint64_t{1} << 33) - 77, uint64_t{1} << 40}) {  // also across the 32-bit boundary
    for (const DrawLanes lanes : lanes_here()) {
      std::vector<double> u(150);
      RandomStream(seed, name).uniforms(u.data(), 150, first, lanes);
      for (uint64_t i = first; i < first + 150; ++i) {
        const PhiloxBlock block =
            philox4x32_10({static_cast<uint32_t>(i / 2), static_cast<uint32_t>(i / 2 >> 32),
                           static_cast<uint32_t>(name), static_cast<uint32_t>(name >> 32)},
                          {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
        const size_t word = i % 2 == 0 ? 0 : 2;
        const uint64_t bits = (uint64_t{block[word]} << 20) | (block[word + 1] >> 12);
        EXPECT_EQ(u[i - first], (static_cast<double>(bits) + 0.5) * 0x1p-52);
      }
    }
  }
}

class EveryInit : public ::testing::TestWithParam<std::tuple<Init, at::ScalarType>> {};

TEST_P(EveryInit, GivesEachShardTheBitsOfTheWhole) {
  const auto [init, dtype] = GetParam();
  const std::vector<int64_t> shape{7, 5};
  const at::Tensor whole = draw(init, shape, whole_box(shape), dtype);
  const std::vector<Box> boxes{{{0, 0}, {2, 5}}, {{2, 0}, {5, 5}}, {{6, 0}, {1, 5}},
                               {{0, 3}, {7, 2}}, {{1, 1}, {3, 3}}, {{7, 0}, {0, 5}}};
  for (const Box& box : boxes) EXPECT_TRUE(draw(init, shape, box, dtype).equal(part(whole, box)));
}

TEST_P(EveryInit, WorksInAnyNumberOfDimensions) {
  const auto [init, dtype] = GetParam();
  const at::Tensor flat = draw(init, {60}, whole_box({60}), dtype);
  EXPECT_TRUE(draw(init, {3, 4, 5}, whole_box({3, 4, 5}), dtype).flatten().equal(flat));
  const Box inner{{1, 2, 0}, {2, 1, 4}};
  EXPECT_TRUE(draw(init, {3, 4, 5}, inner, dtype).equal(part(flat.view({3, 4, 5}), inner)));
  EXPECT_EQ(draw(init, {}, whole_box({}), dtype).numel(), 1);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, EveryInit,
    ::testing::Combine(::testing::Values(Init::constant(1), Init::normal(0.5, 2),
                                         Init::truncated_normal(0.02, -2, 2), Init::uniform(-1, 3)),
                       ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf)));

TEST(Fill, DependsOnSeedAndName) {
  const Box box = whole_box({16});
  const Init normal = Init::normal(0, 1);
  EXPECT_FALSE(draw(normal, {16}, box, at::kFloat, 1).equal(draw(normal, {16}, box, at::kFloat, 2)));
  EXPECT_FALSE(
      draw(normal, {16}, box, at::kFloat, 1, "a").equal(draw(normal, {16}, box, at::kFloat, 1, "b")));
}

// A change of these values would change every run's initial weights. They were computed in Python, by Philox,
// FNV-1a and statistics.NormalDist().inv_cdf.
TEST(Fill, GivesThePinnedFirstValues) {
  const at::Tensor values =
      draw(Init::normal(0, 1), {4}, whole_box({4}), at::kDouble, 42, "tok_embeddings.weight");
  const std::vector<double> expected{-0.7327162271904368, -0.19893211684892778, -0.5543594945739281,
                                     0.18210718812892002};
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(values[i].item<double>(), expected[static_cast<size_t>(i)]);
}

TEST(Fill, HasTheMomentsAndTailsOfANormal) {
  const int64_t count = 1'000'000;
  const at::Tensor x = draw(Init::normal(0, 1), {count}, whole_box({count}), at::kDouble);
  EXPECT_NEAR(x.mean().item<double>(), 0, 4e-3);
  EXPECT_NEAR(x.var().item<double>(), 1, 6e-3);
  EXPECT_NEAR(x.pow(3).mean().item<double>(), 0, 2e-2);
  EXPECT_NEAR(x.pow(4).mean().item<double>(), 3, 5e-2);
  EXPECT_NEAR(x.abs().gt(3).to(at::kDouble).mean().item<double>(), 0.0026998, 2e-4);
  EXPECT_GT(x.abs().max().item<double>(), 4.2);
}

TEST(Fill, CutsATruncatedNormalAtItsBounds) {
  const int64_t count = 1'000'000;
  const double std = 0.125;
  const at::Tensor x =
      draw(Init::truncated_normal(std, -3 * std, 3 * std), {count}, whole_box({count}), at::kDouble);
  EXPECT_LE(x.abs().max().item<double>(), 3 * std);
  EXPECT_GT(x.abs().max().item<double>(), 2.99 * std);
  EXPECT_NEAR(x.var().item<double>() / (std * std), 0.97333,
              6e-3);  // standard deviation of a normal cut at three standard deviations
}

TEST(Fill, EqualsThePlainNormalForFarBounds) {
  const Box box = whole_box({1000});
  EXPECT_TRUE(
      draw(Init::truncated_normal(0.02, -2, 2), {1000}, box).equal(draw(Init::normal(0, 0.02), {1000}, box)));
}

TEST(Fill, SpreadsAUniformOverItsRange) {
  const int64_t count = 200'000;
  const at::Tensor x = draw(Init::uniform(-1, 3), {count}, whole_box({count}), at::kDouble);
  EXPECT_GE(x.min().item<double>(), -1);
  EXPECT_LE(x.max().item<double>(), 3);
  EXPECT_NEAR(x.mean().item<double>(), 1, 2e-2);
  EXPECT_NEAR(x.var().item<double>(), 16.0 / 12, 2e-2);
}

TEST(Fill, RoundsOnceToTheTensorsType) {
  const Box box = whole_box({20000});
  const at::Tensor exact = draw(Init::normal(0, 1), {20000}, box, at::kDouble);
  EXPECT_TRUE(draw(Init::normal(0, 1), {20000}, box, at::kFloat).equal(exact.to(at::kFloat)));
  const at::Tensor bf16 = draw(Init::normal(0, 1), {20000}, box, at::kBFloat16).to(at::kDouble);
  EXPECT_LE(((bf16 - exact) / exact).abs().max().item<double>(), 0x1p-8);
}

TEST(Fill, RefusesBoxesThatDontFit) {
  EXPECT_THROW(draw(Init::normal(0, 1), {4, 4}, {{2, 0}, {3, 4}}), Error);
  EXPECT_THROW(draw(Init::normal(0, 1), {4, 4}, {{0}, {4}}), Error);
  EXPECT_THROW(draw(Init::truncated_normal(1, 2, -2), {4}, whole_box({4})), Error);
}

}  // namespace
}  // namespace titan::nn
