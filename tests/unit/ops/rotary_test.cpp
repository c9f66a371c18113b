#include "titan/ops/rotary.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ops/composite.h"
#include "titan/core/error.h"
#include "unit/golden.h"

namespace titan::ops {
namespace {

using testing::Golden;
using testing::tolerance_of;

at::Tensor table_of(const Golden& golden) {
  return at::stack({golden["table.cos"], golden["table.sin"]}, -1).flatten(1);
}

TEST(Rotary, EqualsPyTorchs) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Golden golden("rope", dtype);
    const at::Tensor x = golden.leaf("rotate.input");
    const at::Tensor y = rotary(x, table_of(golden));
    y.backward(golden["rotate.grad_output"]);
    EXPECT_CLOSE(y, golden["rotate.output"], tolerance_of(dtype));
    EXPECT_CLOSE(x.grad(), golden["rotate.grad_input"], tolerance_of(dtype));
  }
}

TEST(Rotary, KernelEqualsComposite) {
  const at::Tensor angles = at::rand({9, 5}) * 6;
  const at::Tensor table = at::stack({angles.cos(), angles.sin()}, -1).flatten(1);
  const at::Tensor positions = at::randint(9, {2, 7});
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const at::Tensor x = at::randn({2, 7, 3, 10}).to(dtype);
    EXPECT_CLOSE(rotary(x, table, positions), composite::rotary(x.to(at::kDouble), table, positions, false),
                 tolerance_of(dtype));
    EXPECT_EQ(rotary(x, table, positions).scalar_type(), dtype);
  }
}

TEST(Rotary, TakesPositions) {
  const Golden golden("rope");
  const at::Tensor x = golden["rotate.input"], table = table_of(golden);
  const at::Tensor order = at::arange(x.size(1));
  EXPECT_TRUE(rotary(x, table, order).equal(rotary(x, table)));
  EXPECT_TRUE(rotary(x, table, order.expand({x.size(0), -1})).equal(rotary(x, table)));
  EXPECT_TRUE(rotary(x.flip(1), table, order.flip(0)).equal(rotary(x, table).flip(1)));
}

TEST(Rotary, RefusesWhatIsOutsideItsTable) {
  const Golden golden("rope");
  const at::Tensor x = golden["rotate.input"], table = table_of(golden);
  EXPECT_THROW(rotary(x, table.narrow(0, 0, 8)), Error);
  EXPECT_THROW(rotary(x, table, at::arange(x.size(1)) + 4), Error);
  EXPECT_THROW(rotary(x, table, at::arange(3)), Error);
  EXPECT_THROW(rotary(x.narrow(3, 0, 7), table), Error);
}

}  // namespace
}  // namespace titan::ops
