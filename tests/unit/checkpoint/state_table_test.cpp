#include "titan/checkpoint/manifest.h"

#include <numeric>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "titan/core/error.h"

namespace titan::checkpoint {
namespace {

using ::testing::HasSubstr;
using Shape = std::vector<int64_t>;

std::shared_ptr<const TensorLayout> shared_layout(std::vector<LayoutAxis> axes) {
  return std::make_shared<const TensorLayout>(TensorLayout{std::move(axes)});
}

std::string problem(std::vector<StateTensor> tensors, int64_t world_size) {
  try {
    StateTable(std::move(tensors), world_size);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// ---- random tables

// Elements of the last dim, which no axis splits: enough for parts of several MiB with only a few rows.
constexpr int64_t kLong = 100'000;

class RandomTable {
 public:
  explicit RandomTable(unsigned seed) : random_(seed) {
    for (int64_t i = number(1, 4); i > 0; --i) digits_.push_back(number(1, 4));
    for (int64_t digit : digits_) world_size_ *= digit;
    std::vector<StateTensor> tensors;
    for (int64_t i = number(1, 5); i > 0; --i) tensors.push_back(tensor(str("t", i)));
    table = StateTable(std::move(tensors), world_size_);
  }

  StateTable table;

  int64_t number(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }

  Box box_in(const Shape& shape) {
    Box box{shape, shape};
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      box.offset[dim] = number(0, shape[dim]);
      box.length[dim] = number(0, shape[dim] - box.offset[dim]);
    }
    return box;
  }

 private:
  StateTensor tensor(std::string name) {
    StateTensor tensor{.name = std::move(name),
                       .dtype = number(0, 1) ? at::kFloat : at::kBFloat16,
                       .shape = {},
                       .layout = nullptr};
    for (int64_t i = number(0, 3); i > 0; --i)
      tensor.shape.push_back(i == 1 ? number(0, 3) * kLong : number(0, 9));
    tensor.layout = shared_layout(axes(static_cast<int64_t>(tensor.shape.size()) - 1));
    return tensor;
  }

  // Some of the digits, in any order.
  std::vector<LayoutAxis> axes(int64_t num_dims) {
    std::vector<LayoutAxis> axes;
    int64_t stride = 1;
    for (size_t i = 0; i < digits_.size(); stride *= digits_[i++]) {
      const int64_t kind = number(0, 3);
      if (digits_[i] == 1 || kind == 0) continue;
      LayoutAxis axis{.name = str("a", i), .size = digits_[i], .stride = stride};
      if (kind == 1) axis.only = number(0, axis.size - 1);
      if (kind > 1 && num_dims > 0) axis.dim = number(0, num_dims - 1);
      if (kind == 1 || num_dims > 0) axes.push_back(axis);
    }
    std::shuffle(axes.begin(), axes.end(), random_);
    return axes;
  }

  std::mt19937 random_;
  std::vector<int64_t> digits_;
  int64_t world_size_ = 1;
};

// All pieces of a tensor, by rank.
std::vector<Source> all_pieces(const StateTable& table, size_t tensor) {
  std::vector<Source> all;
  for (int64_t rank = 0; rank < table.world_size(); ++rank)
    for (const Piece& piece : table.pieces_of(rank))
      if (piece.tensor == tensor) all.push_back({rank, piece.box});
  return all;
}

int64_t overlap(const Box& a, const Box& b) {
  int64_t numel = 1;
  for (size_t dim = 0; dim < a.offset.size(); ++dim) {
    const int64_t begin = std::max(a.offset[dim], b.offset[dim]);
    const int64_t end = std::min(a.offset[dim] + a.length[dim], b.offset[dim] + b.length[dim]);
    numel *= std::max<int64_t>(end - begin, 0);
  }
  return numel;
}

// The boxes are disjoint, inside the tensor, and have as many elements: so each element is in exactly one.
void expect_tiles(const std::vector<Source>& pieces, const Shape& shape) {
  const Box whole{Shape(shape.size(), 0), shape};
  int64_t numel = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    ASSERT_GT(pieces[i].box.numel(), 0);
    ASSERT_EQ(overlap(pieces[i].box, whole), pieces[i].box.numel());
    for (size_t j = 0; j < i; ++j) ASSERT_EQ(overlap(pieces[i].box, pieces[j].box), 0);
    numel += pieces[i].box.numel();
  }
  ASSERT_EQ(numel, whole.numel());
}

void expect_sources(const StateTable& table, size_t tensor, const std::vector<Source>& pieces,
                    const Box& wanted) {
  std::vector<Source> expected;
  for (const Source& piece : pieces)
    if (overlap(piece.box, wanted) > 0) expected.push_back(piece);
  const std::vector<Source> sources = table.sources_of(tensor, wanted);
  ASSERT_EQ(sources.size(), expected.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    EXPECT_EQ(sources[i].rank, expected[i].rank);
    EXPECT_EQ(sources[i].box, expected[i].box);
  }
}

TEST(StateTable, WritesEachElementOnceAndFindsIt) {
  int64_t shared_out = 0, staged = 0;
  for (unsigned seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    RandomTable random(seed);
    const StateTable& table = random.table;
    for (size_t i = 0; i < table.tensors().size(); ++i) {
      const StateTensor& tensor = table.tensors()[i];
      const std::vector<Source> pieces = all_pieces(table, i);
      ASSERT_NO_FATAL_FAILURE(expect_tiles(pieces, tensor.shape));
      for (int box = 0; box < 5; ++box)
        ASSERT_NO_FATAL_FAILURE(expect_sources(table, i, pieces, random.box_in(tensor.shape)));
      const auto& axes = tensor.layout->axes;
      staged += std::any_of(axes.begin(), axes.end(), [](const LayoutAxis& axis) { return axis.only >= 0; });
      // More pieces than parts: the copies share the writing.
      int64_t parts = 1;
      for (const LayoutAxis& axis : axes) parts *= axis.only < 0 ? axis.size : 1;
      shared_out += static_cast<int64_t>(pieces.size()) > parts;
    }
  }
  // The tables covered the cases that they are meant for.
  EXPECT_GT(shared_out, 100);
  EXPECT_GT(staged, 100);
}

TEST(StateTable, OnlyRanksThatHoldATensorWriteIt) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    RandomTable random(seed);
    for (int64_t rank = 0; rank < random.table.world_size(); ++rank)
      for (const Piece& piece : random.table.pieces_of(rank)) {
        const StateTensor& tensor = random.table.tensors()[piece.tensor];
        ASSERT_TRUE(holds(*tensor.layout, rank));
        const Box part = box_of(*tensor.layout, tensor.shape, rank);
        ASSERT_EQ(overlap(piece.box, part), piece.box.numel());
      }
  }
}

// ---- balance

// A model of 16 layers with AdamW's state; 0.4 GB.
std::vector<StateTensor> model(
    const std::function<std::shared_ptr<const TensorLayout>(int64_t layer, bool is_matrix)>& layout_of_layer,
    int64_t first_rows = 256) {
  const std::vector<std::pair<std::string, Shape>> shapes = {
      {"wq", {512, 512}},  {"wk", {first_rows, 512}}, {"wv", {256, 512}},
      {"wo", {512, 512}},  {"w1", {1376, 512}},       {"w2", {512, 1376}},
      {"w3", {1376, 512}}, {"norm", {512}},           {"step", {}}};
  std::vector<StateTensor> tensors;
  for (int64_t layer = 0; layer < 16; ++layer)
    for (const auto& [name, shape] : shapes)
      for (const char* kind : {"model", "exp_avg", "exp_avg_sq"})
        tensors.push_back({.name = str(kind, ".layers.", layer, ".", name),
                           .dtype = at::kFloat,
                           .shape = shape,
                           .layout = layout_of_layer(layer, shape.size() == 2)});
  return tensors;
}

struct Bytes {
  int64_t least = INT64_MAX;
  int64_t most = 0;
  int64_t sum = 0;
};

Bytes bytes_over_ranks(const StateTable& table) {
  Bytes bytes;
  for (int64_t rank = 0; rank < table.world_size(); ++rank) {
    int64_t written = 0;
    for (const Piece& piece : table.pieces_of(rank)) written += 4 * piece.box.numel();
    bytes.least = std::min(bytes.least, written);
    bytes.most = std::max(bytes.most, written);
    bytes.sum += written;
  }
  return bytes;
}

constexpr int64_t kMiB = int64_t{1} << 20;

// Copies of a layout's parts differ by at most one piece, which has less than 2 MiB.
void expect_balanced(const StateTable& table, int64_t num_layouts_of_a_rank) {
  const Bytes bytes = bytes_over_ranks(table);
  EXPECT_GT(bytes.least, 0);
  EXPECT_LE(bytes.most - bytes.least, 2 * kMiB * num_layouts_of_a_rank);
  EXPECT_LE(static_cast<double>(bytes.most),
            1.1 * static_cast<double>(bytes.sum) / static_cast<double>(table.world_size()));
}

TEST(StateTable, BalancesReplicas) {
  const auto whole = shared_layout({});
  for (int64_t ranks : {2, 3, 8, 16})
    expect_balanced(StateTable(model([&](int64_t, bool) { return whole; }), ranks), 1);
}

TEST(StateTable, BalancesReplicatedShards) {
  const auto rows = shared_layout({{.name = "dp_shard", .size = 4, .stride = 1, .dim = 0}}),
             whole = shared_layout({});
  auto tensors = model([&](int64_t, bool) { return rows; });
  for (StateTensor& tensor : tensors)
    if (tensor.shape.empty()) tensor.layout = whole;
  expect_balanced(StateTable(std::move(tensors), 16), 2);
}

TEST(StateTable, BalancesShardsOfTensorParallelParts) {
  const auto matrix = shared_layout(
      {{.name = "tp", .size = 2, .stride = 1, .dim = 0}, {.name = "fsdp", .size = 4, .stride = 2, .dim = 0}});
  const auto whole = shared_layout({});
  expect_balanced(StateTable(model([&](int64_t, bool is_matrix) { return is_matrix ? matrix : whole; }), 8),
                  2);
}

TEST(StateTable, BalancesCopiesWithinAStage) {
  std::vector<std::shared_ptr<const TensorLayout>> stages;
  for (int64_t stage = 0; stage < 4; ++stage)
    stages.push_back(shared_layout({{.name = "pp", .size = 4, .stride = 4, .only = stage}}));
  // Interleaved: the layers are dealt to the stages in turn.
  expect_balanced(
      StateTable(model([&](int64_t layer, bool) { return stages[static_cast<size_t>(layer % 4)]; }), 16), 1);
}

TEST(StateTable, SpreadsSmallTensorsOverTheRanks) {
  std::vector<StateTensor> tensors;
  for (int64_t i = 0; i < 64; ++i)
    tensors.push_back(
        {.name = str("step", i), .dtype = at::kFloat, .shape = {}, .layout = shared_layout({})});
  const StateTable table(std::move(tensors), 8);
  for (int64_t rank = 0; rank < 8; ++rank) EXPECT_EQ(table.pieces_of(rank).size(), 8u) << rank;
}

// 33 rows for 32 copies make 17 pieces of two rows, and no empty pieces.
TEST(StateTable, PiecesHaveAboutOneMiB) {
  const auto pieces = [](const Shape& shape, int64_t copies) {
    return all_pieces(
               StateTable({{.name = "t", .dtype = at::kFloat, .shape = shape, .layout = shared_layout({})}},
                          copies),
               0)
        .size();
  };
  constexpr int64_t kRow = kMiB / 4;  // floats
  EXPECT_EQ(pieces({1024, 256}, 8), 1u);
  EXPECT_EQ(pieces({1023, 512}, 8), 1u);
  EXPECT_EQ(pieces({1024, 512}, 8), 2u);
  EXPECT_EQ(pieces({1024, 1024}, 8), 4u);
  EXPECT_EQ(pieces({1024, 8192}, 8), 8u);
  EXPECT_EQ(pieces({3, 8 * kRow}, 8), 3u);
  EXPECT_EQ(pieces({33, kRow}, 32), 17u);
  EXPECT_EQ(pieces({8 * kRow}, 4), 4u);
  EXPECT_EQ(pieces({}, 4), 1u);
  EXPECT_EQ(pieces({0, 5}, 4), 0u);
}

// ---- names, order, refusals

TEST(StateTable, IsInFileOrderAndFindsByName) {
  const auto whole = shared_layout({});
  std::vector<StateTensor> tensors;
  for (const auto& [name, dtype] : std::vector<std::pair<std::string, at::ScalarType>>{
           {"b", at::kFloat}, {"z", at::kDouble}, {"a", at::kBFloat16}, {"c", at::kInt}, {"y", at::kByte}})
    tensors.push_back({.name = name, .dtype = dtype, .shape = {2}, .layout = whole});
  const StateTable table(tensors, 1);
  std::vector<std::string> names;
  for (const StateTensor& tensor : table.tensors()) names.push_back(tensor.name);
  EXPECT_EQ(names, (std::vector<std::string>{"z", "b", "c", "a", "y"}));
  for (size_t i = 0; i < names.size(); ++i) EXPECT_EQ(table.find(names[i]), i);
  for (const char* absent : {"", "aa", "zz", "x"}) EXPECT_EQ(table.find(absent), std::nullopt) << absent;
  EXPECT_EQ(StateTable().find("a"), std::nullopt);

  std::reverse(tensors.begin(), tensors.end());
  const StateTable other(tensors, 1);
  for (size_t i = 0; i < names.size(); ++i) EXPECT_EQ(other.tensors()[i].name, names[i]);
}

TEST(StateTable, RefusesInvalidTables) {
  const auto whole = shared_layout({});
  const auto named = [&](std::string name, at::ScalarType dtype = at::kFloat) {
    return StateTensor{.name = std::move(name), .dtype = dtype, .shape = {2}, .layout = whole};
  };
  EXPECT_EQ(problem({named("model.layers.0.w-1 é")}, 1), "");
  EXPECT_THAT(problem({named("a"), named("b"), named("a", at::kDouble)}, 1),
              HasSubstr("two tensors are named 'a'"));
  EXPECT_THAT(problem({named("")}, 1), HasSubstr("is empty"));
  EXPECT_THAT(problem({named("a/b")}, 1), HasSubstr("contains '/'"));
  EXPECT_THAT(problem({named("a..b")}, 1), HasSubstr("contains '..'"));
  EXPECT_THAT(problem({named("a\\b")}, 1), HasSubstr("contains '\\'"));
  EXPECT_THAT(problem({named("a\nb")}, 1), HasSubstr("control characters"));
  EXPECT_THAT(problem({named("a\xff")}, 1), HasSubstr("isn't UTF-8"));
  EXPECT_THAT(problem({named(std::string(1001, 'a'))}, 1), HasSubstr("at most 1000"));
  EXPECT_THAT(problem({named("__metadata__")}, 1), HasSubstr("is reserved by safetensors"));
  EXPECT_THAT(problem({named("a", at::kComplexFloat)}, 1), HasSubstr("tensor 'a': safetensors can't hold"));
  StateTensor bad = named("a");
  bad.layout = shared_layout({{.name = "x", .size = 2, .stride = 1, .dim = 1}});
  EXPECT_THAT(problem({bad}, 2), HasSubstr("tensor 'a': axis 'x' (size 2, stride 1) splits dim 1"));
  bad.layout = shared_layout({{.name = "x\n", .size = 2, .stride = 1, .dim = 0}});
  EXPECT_THAT(problem({bad}, 2), HasSubstr("an axis' name contains control characters"));
  bad.layout = nullptr;
  EXPECT_THAT(problem({bad}, 2), HasSubstr("tensor 'a': it has no layout"));
}

// Each tensor has the largest allowed size: their sum would overflow.
TEST(StateTable, LimitsTheTotalSize) {
  std::vector<StateTensor> tensors;
  for (const char* name : {"a", "b", "c", "d", "e", "f", "g", "h"})
    tensors.push_back(
        {.name = name, .dtype = at::kDouble, .shape = {int64_t{1} << 56}, .layout = shared_layout({})});
  EXPECT_EQ(problem(tensors, 1), "");
  tensors.push_back({.name = "i", .dtype = at::kByte, .shape = {1}, .layout = shared_layout({})});
  EXPECT_THAT(problem(tensors, 1), HasSubstr("bytes together, up to 'i'"));
}

TEST(StateTable, RefusesUnknownTensorsAndBoxes) {
  const StateTable table({{.name = "a", .dtype = at::kFloat, .shape = {4, 2}, .layout = shared_layout({})}},
                         2);
  EXPECT_THROW(table.pieces_of(-1), Error);
  EXPECT_THROW(table.pieces_of(2), Error);
  EXPECT_THROW(table.sources_of(1, {{0, 0}, {4, 2}}), Error);
  for (const Box& outside : std::vector<Box>{{{0, 0}, {5, 2}},
                                             {{-1, 0}, {1, 1}},
                                             {{4, 0}, {1, 1}},
                                             {{0, 0}, {1, -1}},
                                             {{0}, {1}},
                                             {{1, 0}, {INT64_MAX, 1}}})
    EXPECT_THROW(table.sources_of(0, outside), Error);
  EXPECT_EQ(table.sources_of(0, {{4, 0}, {0, 2}}).size(), 0u);
}

// With a million ranks, a search for a few rows must not visit all of them.
TEST(StateTable, SearchesOnlyIntersectingParts) {
  constexpr int64_t kRanks = 1'000'000;
  const StateTable table(
      {{.name = "a",
        .dtype = at::kFloat,
        .shape = {4'000'000, 16},
        .layout = shared_layout({{.name = "dp", .size = kRanks / 10, .stride = 10, .dim = 0},
                                 {.name = "tp", .size = 10, .stride = 1, .dim = 1}})}},
      kRanks);
  const std::clock_t start = std::clock();
  for (int64_t row = 0; row < 4'000'000; row += 40'000)
    EXPECT_EQ(table.sources_of(0, {{row, 0}, {1, 2}}).size(), 1u) << row;
  EXPECT_LT(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC, 0.1);
}

}  // namespace
}  // namespace titan::checkpoint
