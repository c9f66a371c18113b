#include "dist/host_sum.h"

#include <cmath>
#include <limits>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "titan/core/error.h"

namespace titan::dist {
namespace {

at::Tensor reduce(const std::vector<at::Tensor>& parts, ReduceOp op) {
  const auto reducer = make_reducer(parts[0].scalar_type(), op);
  at::Tensor out = at::empty_like(parts[0]);
  reducer->begin(parts[0].data_ptr(), out.numel());
  for (size_t i = 1; i < parts.size(); ++i) reducer->add(parts[i].data_ptr(), out.numel());
  reducer->store(out.data_ptr(), out.numel());
  return out;
}

TEST(Reducer, SumsAndComparesEveryType) {
  for (const auto dtype :
       {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kShort, at::kChar}) {
    const at::Tensor a = at::arange(-50, 51).to(dtype), b = at::arange(50, -51, -1).to(dtype) + 3;
    EXPECT_TRUE(reduce({a, b}, ReduceOp::Sum).equal(a + b)) << dtype;
    EXPECT_TRUE(reduce({a, b}, ReduceOp::Max).equal(at::max(a, b))) << dtype;
    EXPECT_TRUE(reduce({a, b}, ReduceOp::Min).equal(at::min(a, b))) << dtype;
  }
}

TEST(Reducer, RoundsSixteenBitsOnce) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    at::manual_seed(1);
    std::vector<at::Tensor> parts;
    at::Tensor exact = at::zeros({1001});
    for (int i = 0; i < 7; ++i) {
      parts.push_back(at::randn({1001}).to(dtype));
      exact += parts.back().to(at::kFloat);
    }
    EXPECT_TRUE(reduce(parts, ReduceOp::Sum).equal(exact.to(dtype))) << dtype;
  }
}

TEST(Reducer, InfinitiesAndNansSurvive) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor values = at::tensor({inf, -inf, nan, 3.3e38F, 1.0F}).to(dtype),
                     ones = at::ones({5}, dtype);
    for (const auto op : {ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min}) {
      EXPECT_TRUE(std::isnan(reduce({values, ones}, op)[2].item<float>()));
      EXPECT_TRUE(std::isnan(reduce({ones, values}, op)[2].item<float>()));
    }
    EXPECT_EQ(reduce({values, ones}, ReduceOp::Sum)[0].item<float>(), inf);
    EXPECT_EQ(reduce({values, ones}, ReduceOp::Sum)[1].item<float>(), -inf);
  }
}

TEST(Reducer, RefusesOtherTypes) {
  EXPECT_FALSE(can_reduce(at::kComplexFloat));
  EXPECT_TRUE(can_reduce(at::kBool));
  EXPECT_THROW(make_reducer(at::kComplexFloat, ReduceOp::Sum), Error);
}

}  // namespace
}  // namespace titan::dist
