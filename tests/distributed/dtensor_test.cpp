// DTensors over real groups: every change of placement, with even and uneven sizes, over one and two mesh
// axes.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "distributed/world.h"
#include "titan/core/error.h"
#include "titan/tensor/dtensor.h"

namespace titan {
namespace {

using testing::options_of;
using testing::world;

const Placement S0 = Placement::shard(0), S1 = Placement::shard(1), R = Placement::replicate(),
                P = Placement::partial();
using Placements = std::vector<Placement>;

// The same on every rank.
at::Tensor sample(at::IntArrayRef shape) {
  int64_t numel = 1;
  for (int64_t size : shape) numel *= size;
  return at::arange(numel, options_of(at::kDouble)).view(shape) + 1;
}

// Places a whole tensor with any placements. Along a Partial axis each rank has rank + 1 parts of the sum.
DTensor place(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  Placements cut = placements;
  double share = 1;
  for (size_t axis = 0; axis < cut.size(); ++axis) {
    if (!cut[axis].is_partial()) continue;
    cut[axis] = R;
    int size = mesh.axes()[axis].size;
    share *= 2.0 * (mesh.coordinate(mesh.axes()[axis].name) + 1) / (size * (size + 1));
  }
  DTensor tensor = distribute(whole, mesh, cut);
  tensor.local = tensor.local * share;
  tensor.placements = placements;
  return tensor;
}

void expect_whole(const DTensor& tensor, const at::Tensor& whole) {
  at::Tensor full = full_tensor(tensor);
  ASSERT_EQ(full.sizes(), whole.sizes());
  EXPECT_TRUE(at::allclose(full, whole, 1e-12, 0));
}

void expect_placed(const DTensor& tensor, const at::Tensor& whole) {
  EXPECT_EQ(tensor.local.sizes(), at::IntArrayRef(tensor.box.length));
  bool partial = false;
  for (const auto& placement : tensor.placements) partial |= placement.is_partial();
  if (!partial) {
    at::Tensor expected = distribute(whole, tensor.mesh, tensor.placements).local;
    EXPECT_EQ(tensor.box, local_box(tensor.global_shape, tensor.mesh, tensor.placements));
    EXPECT_TRUE(at::allclose(tensor.local, expected, 1e-12, 0));
  }
  expect_whole(tensor, whole);
}

void check_changes(const DeviceMesh& mesh, const std::vector<Placements>& states, at::IntArrayRef shape) {
  at::Tensor whole = sample(shape);
  for (const auto& from : states) {
    for (const auto& to : states) {
      bool possible = true;
      for (size_t axis = 0; axis < to.size(); ++axis)
        possible &= !to[axis].is_partial() || from[axis].is_partial();
      if (possible) expect_placed(redistribute(place(whole, mesh, from), to), whole);
    }
  }
}

TEST(DTensorDistributed, RedistributesOverOneAxis) {
  DeviceMesh mesh = DeviceMesh::create(world(), {{"dp", world().size()}});
  for (std::vector<int64_t> shape : {std::vector<int64_t>{8, 4}, {7, 5}, {1, 3}, {0, 2}}) {
    check_changes(mesh, {{S0}, {S1}, {R}, {P}}, shape);
  }
}

TEST(DTensorDistributed, RedistributesOverTwoAxes) {
  if (world().size() != 4) GTEST_SKIP() << "needs 4 ranks";
  DeviceMesh mesh = DeviceMesh::create(world(), {{"dp", 2}, {"tp", 2}});
  std::vector<Placements> states;
  for (const auto& first : {S0, S1, R, P}) {
    for (const auto& second : {S0, S1, R, P}) states.push_back({first, second});
  }
  check_changes(mesh, states, {7, 5});
  check_changes(mesh, states, {4, 1});
}

// A tensor-parallel part that fully_shard splits again doesn't follow the rule, because the inner axis splits
// first.
TEST(DTensorDistributed, GathersPartsThatDoNotFollowTheRule) {
  if (world().size() != 4) GTEST_SKIP() << "needs 4 ranks";
  DeviceMesh mesh = DeviceMesh::create(world(), {{"dp", 2}, {"tp", 2}});
  at::Tensor whole = sample({7, 3});
  Chunk outer = chunk_of(7, 2, mesh.coordinate("tp")),
        inner = chunk_of(outer.length, 2, mesh.coordinate("dp"));
  DTensor tensor{.local = whole.narrow(0, outer.offset + inner.offset, inner.length).clone(),
                 .mesh = mesh,
                 .placements = {S0, S0},
                 .global_shape = {7, 3},
                 .box = {{outer.offset + inner.offset, 0}, {inner.length, 3}}};
  expect_whole(tensor, whole);
  expect_placed(redistribute(tensor, {R, S0}), whole);
  EXPECT_EQ(redistribute(tensor, {S0, S0}).box, tensor.box);
}

TEST(DTensorDistributed, GathersEveryDtype) {
  DeviceMesh mesh = DeviceMesh::create(world(), {{"dp", world().size()}});
  for (auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kFloat8_e4m3fn, at::kLong,
                     at::kInt, at::kShort, at::kChar, at::kByte, at::kBool}) {
    at::Tensor whole = sample({7, 2}).to(dtype);
    DTensor tensor = distribute(whole, mesh, {S0});
    EXPECT_TRUE(at::equal(full_tensor(tensor).to(at::kDouble), whole.to(at::kDouble))) << dtype;
  }
}

TEST(DTensorDistributed, LeavesTheSourceUnchanged) {
  DeviceMesh mesh = DeviceMesh::create(world(), {{"dp", world().size()}});
  DTensor tensor = place(sample({6, 2}), mesh, {P});
  at::Tensor before = tensor.local.clone();
  (void)redistribute(tensor, {R});
  (void)redistribute(tensor, {S0});
  EXPECT_TRUE(at::equal(tensor.local, before));
}

}  // namespace
}  // namespace titan
