#include "titan/tensor/dtensor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "titan/core/error.h"
#include "titan/dist/world.h"

namespace titan {
namespace {

const Placement S0 = Placement::shard(0), S1 = Placement::shard(1), R = Placement::replicate(),
                P = Placement::partial();

// The mesh as seen by rank `rank` of a job of rows * columns ranks.
DeviceMesh fake_mesh(int rank, int rows, int columns) {
  dist::World world = dist::init({.backend = "fake", .fake_rank = rank, .fake_world_size = rows * columns});
  return DeviceMesh::create(world, {{"rows", rows}, {"columns", columns}});
}

Box box_of_rank(int rank, std::vector<Placement> placements, std::vector<int64_t> shape) {
  return local_box(shape, fake_mesh(rank, 2, 3), placements);
}

TEST(DTensor, ComputesBoxesOfTwoAxes) {
  EXPECT_EQ(box_of_rank(4, {S0, R}, {7, 5}), (Box{{4, 0}, {3, 5}}));
  EXPECT_EQ(box_of_rank(4, {S0, S1}, {7, 5}), (Box{{4, 2}, {3, 2}}));
  EXPECT_EQ(box_of_rank(4, {R, R}, {7, 5}), (Box{{0, 0}, {7, 5}}));
  EXPECT_EQ(box_of_rank(4, {P, S1}, {7, 5}), (Box{{0, 2}, {7, 2}}));
}

TEST(DTensor, SplitsADimensionByTwoAxes) {
  // 7 rows are 4 + 3; then 4 = 2 + 2 + 0 and 3 = 1 + 1 + 1.
  std::vector<Chunk> rows;
  for (int rank = 0; rank < 6; ++rank) {
    Box box = box_of_rank(rank, {S0, S0}, {7});
    rows.push_back({box.offset[0], box.length[0]});
  }
  EXPECT_EQ(rows, (std::vector<Chunk>{{0, 2}, {2, 2}, {4, 0}, {4, 1}, {5, 1}, {6, 1}}));
}

TEST(DTensor, RefusesPlacementsThatDontFitTheMesh) {
  DeviceMesh mesh = fake_mesh(0, 2, 3);
  EXPECT_THROW(local_box({4}, mesh, {S0}), Error);
  EXPECT_THROW(local_box({4}, mesh, {S1, R}), Error);
}

TEST(DTensor, DistributeCutsWithoutCommunication) {
  at::Tensor whole = at::arange(35).view({7, 5});
  DTensor part = distribute(whole, fake_mesh(5, 2, 3), {S0, S1});
  EXPECT_TRUE(at::equal(part.local, whole.narrow(0, 4, 3).narrow(1, 4, 1)));
  EXPECT_TRUE(part.local.is_contiguous());
  EXPECT_EQ(part.global_numel(), 35);
  EXPECT_EQ(part.box, (Box{{4, 4}, {3, 1}}));
  EXPECT_THROW(distribute(whole, fake_mesh(0, 2, 3), {P, R}), Error);
}

TEST(DTensor, OneRankNeedsNoGroup) {
  at::Tensor whole = at::randn({3, 4});
  DTensor tensor = distribute(whole, DeviceMesh(), {});
  EXPECT_TRUE(at::equal(tensor.local, whole));
  EXPECT_TRUE(at::equal(full_tensor(tensor), whole));
}

TEST(DTensor, RefusesImpossiblePlacements) {
  DTensor tensor = distribute(at::randn({4, 4}), fake_mesh(0, 2, 3), {S0, R});
  EXPECT_THROW(redistribute(tensor, {P, R}), Error);
  EXPECT_THROW(redistribute(tensor, {S0}), Error);
  EXPECT_THROW(redistribute(tensor, {Placement::shard(2), R}), Error);
}

}  // namespace
}  // namespace titan
