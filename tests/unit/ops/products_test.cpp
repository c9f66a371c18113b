#include "titan/ops/linear.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "unit/golden.h"

namespace titan::ops {
namespace {

using testing::tolerance_of;

class ProductsTest : public ::testing::TestWithParam<std::tuple<CpuMatmul, at::ScalarType>> {
 protected:
  std::shared_ptr<const Products> products = default_products(std::get<0>(GetParam()));
  at::ScalarType dtype = std::get<1>(GetParam());
  at::Tensor x = at::randn({33, 20}).to(dtype), weight = at::randn({17, 20}).to(dtype),
             grad = at::randn({33, 17}).to(dtype);
};

TEST_P(ProductsTest, ComputeTheThreeProductsOfALinearLayer) {
  EXPECT_CLOSE(products->forward(x, weight), x.to(at::kDouble).mm(weight.to(at::kDouble).t()),
               tolerance_of(dtype));
  EXPECT_CLOSE(products->grad_input(grad, weight), grad.to(at::kDouble).mm(weight.to(at::kDouble)),
               tolerance_of(dtype));
  EXPECT_CLOSE(products->grad_weight(grad, x), grad.to(at::kDouble).t().mm(x.to(at::kDouble)),
               tolerance_of(dtype));
  EXPECT_EQ(products->forward(x, weight).scalar_type(), dtype);
}

TEST_P(ProductsTest, AddTheWeightGradientInTheBuffersPrecision) {
  at::Tensor out = at::ones({17, 20}, dtype == at::kDouble ? at::kDouble : at::kFloat);
  const WeightGrad weight_grad{products, grad, x};
  weight_grad.add_to(out);
  EXPECT_CLOSE(out, grad.to(at::kDouble).t().mm(x.to(at::kDouble)) + 1, tolerance_of(dtype));
}

TEST_P(ProductsTest, WriteToAPlaceWhatTheyReturn) {
  const at::Tensor y = at::full({33, 17}, 9, dtype), grad_x = at::full({33, 20}, 9, dtype);
  if (products->put_product(y, Pass::Forward, x, weight)) {
    EXPECT_TRUE(at::equal(y, products->forward(x, weight)));
    EXPECT_TRUE(products->put_product(grad_x, Pass::Backward, grad, weight));
    EXPECT_TRUE(at::equal(grad_x, products->grad_input(grad, weight)));
  } else {
    EXPECT_EQ(dtype, at::kBFloat16) << "only products in another dtype have none of this size";
    EXPECT_TRUE(y.eq(9).all().item<bool>());
  }
}

TEST_P(ProductsTest, AcceptZeroRows) {
  const at::Tensor none = x.narrow(0, 0, 0), no_grad = grad.narrow(0, 0, 0);
  EXPECT_EQ(products->forward(none, weight).sizes(), at::IntArrayRef({0, 17}));
  EXPECT_EQ(products->grad_input(no_grad, weight).sizes(), at::IntArrayRef({0, 20}));
  EXPECT_EQ(products->grad_weight(no_grad, none).abs().sum().item<double>(), 0);
}

INSTANTIATE_TEST_SUITE_P(Policies, ProductsTest,
                         ::testing::Combine(::testing::Values(CpuMatmul::Auto, CpuMatmul::Mkl,
                                                              CpuMatmul::OneDnn),
                                            ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16)));

TEST(Products, ShareOneObjectPerPolicy) { EXPECT_EQ(default_products(), default_products()); }

}  // namespace
}  // namespace titan::ops
