#include "titan/checkpoint/manifest.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "titan/core/error.h"
#include "titan/dist/world.h"

namespace titan::checkpoint {
namespace {

using ::testing::HasSubstr;
using Shape = std::vector<int64_t>;

const Placement S0 = Placement::shard(0), S1 = Placement::shard(1), R = Placement::replicate();

struct Grid {
  int pp = 1;
  int dp_replicate = 1;
  int dp_shard = 1;
  int cp = 1;
  int tp = 1;
  int size() const { return pp * dp_replicate * dp_shard * cp * tp; }
};

// How a model's tensors are spread: over copies, FSDP's axis (dp_shard x cp) and the tensor-parallel axis.
struct Cut {
  Shape shape;
  std::vector<Placement> placements;
  std::vector<int> order;
};

struct Meshes {
  DeviceMesh pipeline;
  DeviceMesh tensors;
};

Meshes meshes_of(int rank, const Grid& grid) {
  const dist::World world =
      dist::init({.backend = "fake", .fake_rank = rank, .fake_world_size = grid.size()});
  const DeviceMesh mesh = DeviceMesh::create(world, {{"pp", grid.pp},
                                                     {"dp_replicate", grid.dp_replicate},
                                                     {"dp_shard", grid.dp_shard},
                                                     {"cp", grid.cp},
                                                     {"tp", grid.tp}});
  mesh.flatten({"dp_shard", "cp"}, "fsdp");
  return {mesh["pp"], mesh({"dp_replicate", "fsdp", "tp"})};
}

DTensor tensor_of(const Cut& cut, const DeviceMesh& mesh) {
  return {.local = {},
          .mesh = mesh,
          .placements = cut.placements,
          .global_shape = cut.shape,
          .box = local_box(cut.shape, mesh, cut.placements, cut.order),
          .cut_order = cut.order};
}

// Each rank's own description of the tensor.
struct Said {
  std::vector<TensorLayout> layouts;
  std::vector<Box> boxes;
};

Said said_by_all(const Grid& grid, const Cut& cut) {
  Said said;
  for (int rank = 0; rank < grid.size(); ++rank) {
    const Meshes meshes = meshes_of(rank, grid);
    const DTensor tensor = tensor_of(cut, meshes.tensors);
    said.layouts.push_back(layout_of(tensor, meshes.pipeline));
    said.boxes.push_back(tensor.box);
  }
  return said;
}

void count_elements(const Box& box, const Shape& shape, std::vector<int>& counts) {
  for (int64_t row = 0; row < box.length[0]; ++row)
    for (int64_t column = 0; column < box.length[1]; ++column)
      ++counts[static_cast<size_t>((box.offset[0] + row) * shape[1] + box.offset[1] + column)];
}

// Checks that one rank's layout describes every rank's part, and that the parts tile the tensor.
void expect_tiled(const TensorLayout& layout, const Cut& cut, const Said& said) {
  const auto world_size = static_cast<int64_t>(said.boxes.size());
  check_layout(layout, cut.shape, world_size);
  const int64_t copies = num_replicas(layout, world_size);
  std::vector<int> counts(static_cast<size_t>(cut.shape[0] * cut.shape[1]));
  std::map<std::pair<Shape, int64_t>, std::vector<int64_t>> replicas;  // ranks by position on the axes
  for (int64_t rank = 0; rank < world_size; ++rank) {
    const bool is_mine = said.layouts[static_cast<size_t>(rank)] == layout;
    ASSERT_EQ(holds(layout, rank), is_mine) << rank;
    if (!is_mine) continue;
    const Box box = box_of(layout, cut.shape, rank);
    ASSERT_EQ(box, said.boxes[static_cast<size_t>(rank)]) << rank;
    Shape positions;
    for (const LayoutAxis& axis : layout.axes) positions.push_back(rank / axis.stride % axis.size);
    auto& part = replicas[{positions, 0}];
    EXPECT_EQ(replica_of(layout, world_size, rank), static_cast<int64_t>(part.size())) << rank;
    if (part.empty()) count_elements(box, cut.shape, counts);
    part.push_back(rank);
  }
  for (const auto& [position, ranks] : replicas) EXPECT_EQ(static_cast<int64_t>(ranks.size()), copies);
  for (int count : counts) EXPECT_EQ(count, 1);
}

std::vector<Cut> all_cuts() {
  std::vector<Cut> cuts;
  for (const Shape& shape : std::vector<Shape>{{7, 5}, {16, 8}, {2, 3}, {1, 9}, {0, 4}})
    for (const auto& placements : std::vector<std::vector<Placement>>{
             {R, S0, S0}, {R, S0, S1}, {R, S1, S0}, {R, S0, R}, {R, R, S1}, {S0, S0, S0}, {R, R, R}})
      for (const auto& order : std::vector<std::vector<int>>{{}, {2, 0, 1}})
        cuts.push_back({shape, placements, order});
  return cuts;
}

class Layouts : public ::testing::TestWithParam<Grid> {};

TEST_P(Layouts, DescribeEveryRanksPart) {
  for (const Cut& cut : all_cuts()) {
    const Said said = said_by_all(GetParam(), cut);
    for (const TensorLayout& layout : said.layouts) {
      ASSERT_NO_FATAL_FAILURE(expect_tiled(layout, cut, said));
      // The ranks of a stage agree, so one of each is enough.
      if (GetParam().pp == 1) break;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Grids, Layouts,
    ::testing::Values(Grid{}, Grid{.dp_shard = 4}, Grid{.dp_replicate = 3},
                      Grid{.dp_replicate = 2, .dp_shard = 3}, Grid{.dp_shard = 2, .tp = 2},
                      Grid{.dp_shard = 3, .cp = 2, .tp = 2}, Grid{.pp = 2, .dp_shard = 2, .tp = 3},
                      Grid{.pp = 3, .dp_replicate = 2, .cp = 2, .tp = 2},
                      Grid{.pp = 2, .dp_replicate = 2, .dp_shard = 2, .cp = 2}),
    [](const auto& info) {
      const Grid& g = info.param;
      return str("pp", g.pp, "replicate", g.dp_replicate, "shard", g.dp_shard, "cp", g.cp, "tp", g.tp);
    });

TEST(Layout, ListsOnlyAxesThatSplit) {
  const Meshes meshes = meshes_of(21, {.pp = 2, .dp_replicate = 2, .dp_shard = 3, .tp = 2});
  const TensorLayout layout =
      layout_of(tensor_of({{8, 8}, {R, S0, S1}, {2, 0, 1}}, meshes.tensors), meshes.pipeline);
  const std::vector<LayoutAxis> expected = {{.name = "pp", .size = 2, .stride = 12, .only = 1},
                                            {.name = "tp", .size = 2, .stride = 1, .dim = 1},
                                            {.name = "fsdp", .size = 3, .stride = 2, .dim = 0}};
  EXPECT_EQ(layout.axes, expected);
}

TEST(Layout, IsTheSameOnAllRanksWithoutAMesh) {
  const DTensor scalar{.local = at::zeros({}), .mesh = {}, .placements = {}, .global_shape = {}, .box = {}};
  EXPECT_TRUE(layout_of(scalar).axes.empty());
  const Meshes meshes = meshes_of(3, {.pp = 2, .dp_shard = 2});
  const TensorLayout staged = layout_of(scalar, meshes.pipeline);
  EXPECT_EQ(num_replicas(staged, 4), 2);
  EXPECT_FALSE(holds(staged, 1));
  EXPECT_TRUE(holds(staged, 2));
}

template <class Function>
std::string problem(Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Layout, RefusesATensorThatContradictsItsPlacements) {
  const Meshes meshes = meshes_of(1, {.dp_shard = 2, .tp = 2});
  const DTensor good = tensor_of({{6, 4}, {R, S0, S1}, {}}, meshes.tensors);
  layout_of(good);
  DTensor bad = good;
  bad.box.offset[1] = 0;
  EXPECT_THAT(problem([&] { layout_of(bad); }),
              HasSubstr("rank 1's part of a tensor of [6, 4] begins at [0, 0]"));
  bad = good;
  bad.placements[1] = Placement::partial();
  EXPECT_THAT(problem([&] { layout_of(bad); }), HasSubstr("Partial on mesh axis 'fsdp'"));
  bad = good;
  bad.placements.pop_back();
  EXPECT_THAT(problem([&] { layout_of(bad); }), HasSubstr("2 placements on a mesh of 3 axes"));
  bad = good;
  bad.cut_order = {0, 1, 1};
  EXPECT_THAT(problem([&] { layout_of(bad); }), HasSubstr("a cut order"));
  bad = good;
  bad.placements[2] = Placement::shard(2);
  EXPECT_THAT(problem([&] { layout_of(bad); }), HasSubstr("splits dim 2; the tensor has 2 dimensions"));
  EXPECT_THAT(problem([&] { layout_of(good, meshes.tensors); }), HasSubstr("a pipeline has one axis"));
}

// Axes that aren't neighbors don't form a digit of the rank numbers.
TEST(Layout, RefusesAnAxisWithoutAStride) {
  const dist::World world = dist::init({.backend = "fake", .fake_rank = 0, .fake_world_size = 8});
  const DeviceMesh mesh = DeviceMesh::create(world, {{"a", 2}, {"b", 2}, {"c", 2}});
  const DeviceMesh ends = mesh.flatten({"a", "c"}, "ends");
  const Cut cut{{8, 1}, {S0}, {}};
  EXPECT_THAT(problem([&] { layout_of(tensor_of(cut, ends)); }),
              HasSubstr("mesh axis 'ends': rank 4 at position 2"));
}

struct Unsound {
  std::vector<LayoutAxis> axes;
  const char* why;
};

TEST(Layout, RefusesUnsoundLayouts) {
  const std::vector<Unsound> cases = {
      {{{.name = "a", .size = 1, .stride = 1, .dim = 0}}, "size has to be 2 or more"},
      {{{.name = "a", .size = -2, .stride = 1, .dim = 0}}, "size has to be 2 or more"},
      {{{.name = "a", .size = 2, .stride = 0, .dim = 0}}, "stride 1 or more"},
      {{{.name = "a", .size = 2, .stride = 1}}, "exactly one of them is -1"},
      {{{.name = "a", .size = 2, .stride = 1, .dim = 0, .only = 0}}, "exactly one of them is -1"},
      {{{.name = "a", .size = 2, .stride = 1, .dim = 2}}, "splits dim 2; the tensor has 2 dimensions"},
      {{{.name = "a", .size = 2, .stride = 1, .dim = -2}}, "splits dim -2"},
      {{{.name = "a", .size = 2, .stride = 1, .only = 2}}, "no position 2 on it"},
      {{{.name = "a", .size = 2, .stride = 1, .only = -7}}, "no position -7 on it"},
      {{{.name = "a", .size = 2, .stride = 12, .dim = 0}}, "needs more than 12 ranks"},
      {{{.name = "a", .size = 13, .stride = 1, .dim = 0}}, "needs more than 12 ranks"},
      {{{.name = "a", .size = 2, .stride = INT64_MAX, .dim = 0}}, "needs more than 12 ranks"},
      {{{.name = "a", .size = INT64_MAX, .stride = 1, .dim = 0}}, "needs more than 12 ranks"},
      {{{.name = "a", .size = 5, .stride = 1, .dim = 0}}, "repeat every 5 ranks"},
      {{{.name = "a", .size = 2, .stride = 4, .dim = 0}}, "repeat every 8 ranks"},
      {{{.name = "a", .size = 2, .stride = 1, .dim = 0}, {.name = "b", .size = 2, .stride = 1, .dim = 1}},
       "axis 'b' (size 2, stride 1) isn't independent"},
      {{{.name = "a", .size = 4, .stride = 1, .dim = 0}, {.name = "b", .size = 3, .stride = 2, .dim = 1}},
       "isn't a multiple of 4"}};
  for (const Unsound& unsound : cases)
    EXPECT_THAT(problem([&] { check_layout({unsound.axes}, {8, 8}, 12); }), HasSubstr(unsound.why));
  const TensorLayout sound{
      {{.name = "b", .size = 3, .stride = 4, .dim = 1}, {.name = "a", .size = 2, .stride = 1, .dim = 0}}};
  EXPECT_EQ(problem([&] { check_layout(sound, {8, 8}, 12); }), "");
  EXPECT_THAT(problem([&] { check_layout(sound, {8, 8}, 0); }), HasSubstr("a world of 0 ranks"));
}

TEST(Layout, RefusesHugeShapes) {
  const auto said_of = [](const Shape& shape) { return problem([&] { check_layout({}, shape, 1); }); };
  EXPECT_EQ(said_of({int64_t{1} << 56}), "");
  EXPECT_EQ(said_of({}), "");
  EXPECT_THAT(said_of({-1}), HasSubstr("negative"));
  EXPECT_THAT(said_of({(int64_t{1} << 56) + 1}), HasSubstr("more than 2^56 elements"));
  EXPECT_THAT(said_of({int64_t{1} << 32, int64_t{1} << 32}), HasSubstr("more than 2^56 elements"));
  EXPECT_THAT(said_of({INT64_MAX, 0}), HasSubstr("more than 2^56 elements"));
  EXPECT_THAT(said_of(Shape(65, 1)), HasSubstr("at most 64"));
}

// The parts tile the tensor if every combination of positions occurs equally often. A layout whose parts
// don't tile it must not pass.
TEST(Layout, AcceptsOnlyLayoutsThatTileTheTensor) {
  int sound = 0, unsound = 0;
  const Shape shape = {7, 6};
  for (int64_t world_size : {4, 6, 8, 12})
    for (int64_t size_a = 2; size_a <= 4; ++size_a)
      for (int64_t stride_a = 1; stride_a <= 6; ++stride_a)
        for (int64_t size_b = 2; size_b <= 4; ++size_b)
          for (int64_t stride_b = 1; stride_b <= 6; ++stride_b) {
            const TensorLayout layout{{{.name = "a", .size = size_a, .stride = stride_a, .dim = 0},
                                       {.name = "b", .size = size_b, .stride = stride_b, .dim = 1}}};
            // The number of ranks at each pair of positions: equal for independent digits.
            std::map<std::pair<int64_t, int64_t>, int64_t> ranks;
            for (int64_t rank = 0; rank < world_size; ++rank)
              ++ranks[{rank / stride_a % size_a, rank / stride_b % size_b}];
            bool even = static_cast<int64_t>(ranks.size()) == size_a * size_b;
            for (const auto& [positions, count] : ranks) even &= count == ranks.begin()->second;
            const bool passes = problem([&] { check_layout(layout, shape, world_size); }).empty();
            if (passes) EXPECT_TRUE(even);
            (passes ? sound : unsound) += 1;
          }
  EXPECT_GT(sound, 20);
  EXPECT_GT(unsound, 20);
}

}  // namespace
}  // namespace titan::checkpoint
