#include "titan/dist/device_mesh.h"

#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "titan/core/error.h"

namespace titan {
namespace {

using ::testing::HasSubstr;
using Ranks = std::vector<int>;

dist::World fake_world(int rank, int size) {
  return dist::init({.backend = "fake", .fake_rank = rank, .fake_world_size = size});
}

/// The ranks along `axis`, over all ranks of a world of `size`.
std::set<Ranks> groups_along(int size, const std::vector<MeshAxis>& axes, std::string_view axis) {
  std::set<Ranks> groups;
  for (int rank = 0; rank < size; ++rank) {
    groups.insert(DeviceMesh::create(fake_world(rank, size), axes)[axis].ranks());
  }
  return groups;
}

TEST(DeviceMesh, RanksAreLaidOutRowMajor) {
  const std::vector<MeshAxis> axes = {{"pp", 2}, {"dp_shard", 2}, {"tp", 2}};
  EXPECT_EQ(groups_along(8, axes, "pp"), (std::set<Ranks>{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(groups_along(8, axes, "dp_shard"), (std::set<Ranks>{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(groups_along(8, axes, "tp"), (std::set<Ranks>{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
}

TEST(DeviceMesh, CoordinatesAndPositions) {
  const auto mesh = DeviceMesh::create(fake_world(11, 24), {{"pp", 2}, {"dp", 3}, {"tp", 4}});
  EXPECT_EQ(mesh.coordinate("pp"), 0);
  EXPECT_EQ(mesh.coordinate("dp"), 2);
  EXPECT_EQ(mesh.coordinate("tp"), 3);
  EXPECT_EQ(mesh.rank(), 11);
  EXPECT_EQ(mesh.size(), 24);
  EXPECT_EQ(mesh["dp"].rank(), 2);
  EXPECT_EQ(mesh["dp"].ranks(), (Ranks{3, 7, 11}));
  EXPECT_EQ(mesh({"pp", "tp"}).ranks(), (Ranks{8, 9, 10, 11, 20, 21, 22, 23}));
  EXPECT_EQ(mesh({"pp", "tp"}).rank(), 3);
}

TEST(DeviceMesh, MinusOneTakesTheRest) {
  const auto mesh = DeviceMesh::create(fake_world(0, 12), {{"a", 2}, {"b", -1}, {"c", 3}});
  EXPECT_EQ(mesh.size("b"), 2);
}

TEST(DeviceMesh, WrongSizesAreConfigErrors) {
  const auto world = fake_world(0, 6);
  const auto problem = [&](std::vector<MeshAxis> axes) -> std::string {
    try {
      DeviceMesh::create(world, std::move(axes));
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(problem({{"a", 4}}), HasSubstr("divisors: 1, 2, 3, 6"));
  EXPECT_THAT(problem({{"a", 4}, {"b", -1}}), HasSubstr("divide"));
  EXPECT_THAT(problem({{"a", -1}, {"b", -1}}), HasSubstr("only one"));
  EXPECT_THAT(problem({{"a", 0}}), HasSubstr("allowed: 1 and above"));
  EXPECT_THAT(problem({{"a", 2}, {"a", 3}}), HasSubstr("twice"));
}

TEST(DeviceMesh, FlattenCountsAdjacentAxes) {
  const auto mesh =
      DeviceMesh::create(fake_world(5, 16), {{"dp_replicate", 2}, {"dp_shard", 2}, {"cp", 2}, {"tp", 2}});
  const auto fsdp = mesh.flatten({"dp_shard", "cp"}, "fsdp");
  EXPECT_EQ(fsdp.num_axes(), 1);
  EXPECT_EQ(fsdp.size("fsdp"), 4);
  EXPECT_EQ(fsdp.ranks(), (Ranks{1, 3, 5, 7}));
  EXPECT_EQ(fsdp.coordinate("fsdp"), 2);
  // The mesh knows the new axis from now on, and keeps the old ones.
  EXPECT_TRUE(mesh.has("fsdp"));
  EXPECT_EQ(mesh({"dp_replicate", "fsdp"}).size(), 8);
  EXPECT_EQ(mesh({"dp_replicate", "fsdp"}).size("fsdp"), 4);
  EXPECT_EQ(mesh["cp"].size(), 2);
  // A repeated call returns the same mesh; another meaning of the name is refused.
  EXPECT_EQ(mesh.flatten({"dp_shard", "cp"}, "fsdp"), fsdp);
  EXPECT_THROW(mesh.flatten({"dp_shard", "tp"}, "fsdp"), Error);
}

TEST(DeviceMesh, SubMeshesKeepTheOrder) {
  const auto mesh = DeviceMesh::create(fake_world(0, 4), {{"a", 2}, {"b", 2}});
  EXPECT_THROW(mesh({"b", "a"}), Error);
  EXPECT_THROW(mesh({"a", "a"}), Error);
  EXPECT_THROW(mesh["c"], Error);
  EXPECT_THROW(mesh["a"]["b"], Error);
  EXPECT_FALSE(mesh["a"].has("b"));
}

TEST(DeviceMesh, SizeOneAxesAreFree) {
  const auto mesh = DeviceMesh::create(fake_world(1, 2), {{"pp", 1}, {"dp", 2}, {"tp", 1}});
  EXPECT_EQ(mesh.group("pp")->size(), 1);
  EXPECT_EQ(mesh.group("tp")->ranks(), Ranks{1});
  EXPECT_EQ(mesh({"dp", "tp"}).group()->ranks(), (Ranks{0, 1}));
}

TEST(DeviceMesh, GroupsAreMadeOnce) {
  const auto mesh = DeviceMesh::create(fake_world(3, 8), {{"dp", 4}, {"tp", 2}});
  EXPECT_EQ(mesh.group("dp"), mesh.group("dp"));
  EXPECT_EQ(mesh.group("dp")->ranks(), (Ranks{1, 3, 5, 7}));
  EXPECT_EQ(mesh.group("dp")->rank(), 1);
  EXPECT_EQ(mesh.group()->size(), 8);
}

TEST(DeviceMesh, Equality) {
  const auto world = fake_world(0, 4);
  const auto a = DeviceMesh::create(world, {{"x", 2}, {"y", 2}});
  const auto b = DeviceMesh::create(world, {{"x", 2}, {"y", 2}});
  EXPECT_EQ(a, b);
  EXPECT_EQ(a["x"], b["x"]);
  EXPECT_FALSE(a["x"] == a["y"]);
}

TEST(DeviceMesh, DefaultIsOneRank) {
  const DeviceMesh mesh;
  EXPECT_EQ(mesh.size(), 1);
  EXPECT_EQ(mesh.rank(), 0);
  EXPECT_EQ(mesh.num_axes(), 0);
  EXPECT_EQ(mesh.group()->size(), 1);
  EXPECT_THROW(mesh.world(), Error);
}

}  // namespace
}  // namespace titan
