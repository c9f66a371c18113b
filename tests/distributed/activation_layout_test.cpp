// Compares every conversion of an activation with the definition of its two layouts, for value and gradient.

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "distributed/toy_model.h"
#include "distributed/world.h"
#include "titan/core/error.h"
#include "titan/parallel/tensor_parallel.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names
using Layout = ActivationLayout;

/// Returns its arguments.
class PassImpl : public nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    check_entered_through_ref();
    return x.alias();
  }
  std::vector<at::Tensor> forward(const at::Tensor& ids, const at::Tensor& a, const at::Tensor& b) {
    check_entered_through_ref();
    return {ids, a.alias(), b.alias()};
  }
};
TITAN_MODULE(Pass);

class NetImpl : public nn::Module {
 public:
  NetImpl() { register_module("pass", pass); }
  Pass pass;
};
TITAN_MODULE(Net);

Net net_with(const ParallelStyle& style) {
  Net net;
  parallelize(net, DeviceMesh::create(world(), {{"tp", world().size()}}), {{"pass", style}});
  return net;
}

at::Tensor numbers(at::IntArrayRef sizes) { return BlockImpl::values(sizes, options_of(at::kDouble)); }

// Summands differ between ranks and add up to 1.
double share() {
  const int size = world().size();
  return world().rank() == 0 ? 1 - 0.25 * (size - 1) : 0.25;
}

at::Tensor part(const at::Tensor& whole, int64_t dim) {
  return whole.tensor_split(world().size(), dim)[static_cast<size_t>(world().rank())].contiguous();
}

// This rank's part of a value, or of a gradient, in this layout, by the table at ActivationLayout.
at::Tensor value_in(const Layout& layout, const at::Tensor& whole) {
  if (layout.kind == Layout::Kind::Shard) return part(whole, layout.dim);
  return layout.kind == Layout::Kind::Partial ? whole * share() : whole.clone();
}
at::Tensor gradient_in(const Layout& layout, const at::Tensor& whole) {
  if (layout.kind == Layout::Kind::Shard) return part(whole, layout.dim);
  return layout.kind == Layout::Kind::Replicate ? whole * share() : whole.clone();
}

at::Tensor sum_over_ranks(const at::Tensor& summand) {
  at::Tensor sum = summand.clone(at::MemoryFormat::Contiguous);
  world().everyone()->all_reduce(sum, dist::ReduceOp::Sum, {"test::sum"}).wait();
  return sum;
}

void expect_near(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  EXPECT_LE((got - expected).abs().max().item<double>(), 1e-12) << what;
}

// Compares with the whole gradient, in `layout`; summands only need to add up to it.
void expect_gradient(const Layout& layout, const at::Tensor& got, const at::Tensor& whole,
                     const std::string& what) {
  if (layout.kind == Layout::Kind::Replicate) return expect_near(sum_over_ranks(got), whole, what);
  expect_near(got, gradient_in(layout, whole), what);
}

struct Pair {
  Layout from, to;
};

std::vector<Pair> pairs_with(const Layout& shard) {
  const Layout replicate = Layout::replicate(), invariant = Layout::invariant(), partial = Layout::partial();
  return {{shard, replicate}, {shard, invariant},   {invariant, replicate}, {invariant, shard},
          {replicate, shard}, {partial, invariant}, {partial, shard},       {partial, replicate},
          {shard, shard},     {partial, partial}};
}

class Conversions : public ::testing::TestWithParam<int64_t> {
 protected:
  // Three dimensions of different sizes, each divisible by the number of ranks.
  at::Tensor whole() const {
    const int64_t n = world().size();
    return numbers({2 * n, 3 * n, n});
  }

  template <class Prepare>
  void check() const {
    const at::Tensor value = whole(), gradient = whole().cos();
    for (const auto& [from, to] : pairs_with(Layout::shard(GetParam()))) {
      const std::string what = str(from, " -> ", to);
      const Net net = net_with(Prepare{from, to});
      const at::Tensor x = value_in(from, value).requires_grad_();
      const at::Tensor y = net->pass(x);
      expect_near(y, value_in(to, value), what);
      y.backward(gradient_in(to, gradient));
      expect_gradient(from, x.grad(), gradient, what);
    }
  }
};

TEST_P(Conversions, OfArgumentsKeepValueAndGradient) { check<PrepareInput>(); }
TEST_P(Conversions, OfResultsKeepValueAndGradient) { check<PrepareOutput>(); }

// A sum's gradient is one number with strides of zero, and a transposed value isn't contiguous.
TEST_P(Conversions, TakeTensorsOfAnyStrides) {
  const at::Tensor value = whole();
  for (const auto& [from, to] : pairs_with(Layout::shard(GetParam()))) {
    const std::string what = str(from, " -> ", to);
    const Net net = net_with(PrepareInput{from, to});
    const at::Tensor x = value_in(from, value).transpose(0, 2).contiguous().transpose(0, 2).requires_grad_();
    const at::Tensor y = net->pass(x);
    expect_near(y, value_in(to, value), what);
    (to.kind == Layout::Kind::Replicate ? y.sum() * share() : y.sum()).backward();
    expect_gradient(from, x.grad(), at::ones_like(value), what);
  }
}

INSTANTIATE_TEST_SUITE_P(Along, Conversions, ::testing::Values(0, 1, 2, -1, -3), [](const auto& info) {
  return info.param < 0 ? str("LastBut", -1 - info.param) : str("Dim", info.param);
});

TEST(Conversion, TakesFloatingTensorsByNumber) {
  const int64_t n = world().size();
  const Net net = net_with(PrepareInput{Layout::invariant(), Layout::shard(0), {1}});
  const at::Tensor ids = at::arange(2 * n, options_of(at::kLong)), a = numbers({2 * n}),
                   b = numbers({2 * n, 3});
  const auto got = net->pass(ids, a, b);
  EXPECT_TRUE(got[0].equal(ids));
  expect_near(got[1], a, "number 0");
  expect_near(got[2], part(b, 0), "number 1");
}

TEST(Conversion, RefusesANumberOutOfRange) {
  const Net net = net_with(PrepareInput{Layout::invariant(), Layout::replicate(), {1}});
  EXPECT_THROW(
      {
        try {
          net->pass(numbers({4}));
        } catch (const Error& error) {
          EXPECT_NE(std::string(error.what()).find("number 1 of module 'pass', whose call has 1"),
                    std::string::npos)
              << error.what();
          throw;
        }
      },
      Error);
}

TEST(Conversion, LeavesNoHistoryOnValuesWithoutGradients) {
  const Net net = net_with(PrepareInput{Layout::invariant(), Layout::shard(0)});
  EXPECT_FALSE(net->pass(numbers({2 * int64_t{world().size()}})).requires_grad());
}

TEST(Conversion, RefusesPartsOfUnequalLength) {
  const int64_t odd = 2 * int64_t{world().size()} + 1;
  for (const Layout& from : {Layout::invariant(), Layout::replicate(), Layout::partial()}) {
    const Net net = net_with(PrepareInput{from, Layout::shard(1)});
    try {
      net->pass(numbers({2, odd}));
      ADD_FAILURE() << from << " -> Shard(1) of " << odd << " was accepted";
    } catch (const Error& error) {
      const std::string expected = str("dimension 1 of [2, ", odd, "] at module 'pass' can't be cut into ",
                                       world().size(), " equal parts");
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
  }
}

TEST(Conversion, RefusesADimensionOutOfRange) {
  for (const int64_t dim : {2, -3}) {
    const Net net = net_with(PrepareInput{Layout::invariant(), Layout::shard(dim)});
    EXPECT_THROW(net->pass(numbers({12, 12})), Error);
  }
}

}  // namespace
}  // namespace titan
