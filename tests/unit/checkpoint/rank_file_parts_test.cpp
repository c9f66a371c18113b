// Reading parts of a file's tensors, compared with slices of the tensors.

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

#include "checkpoint/format/rank_file.h"
#include "unit/checkpoint/rank_file_support.h"

namespace titan::checkpoint {
namespace {

using namespace testing;
using titan::testing::TempFolder;

at::Tensor slice(at::Tensor whole, const Box& box, const std::vector<int64_t>& origin) {
  for (size_t dim = 0; dim < origin.size(); ++dim)
    whole = whole.narrow(static_cast<int64_t>(dim), box.offset[dim] - origin[dim], box.length[dim]);
  return whole;
}

Box intersection(const Box& a, const Box& b) {
  Box both = a;
  for (size_t dim = 0; dim < a.offset.size(); ++dim) {
    both.offset[dim] = std::max(a.offset[dim], b.offset[dim]);
    const int64_t end = std::min(a.offset[dim] + a.length[dim], b.offset[dim] + b.length[dim]);
    both.length[dim] = std::max<int64_t>(end - both.offset[dim], 0);
  }
  return both;
}

// The bytes of the blocks that hold `part` of a tensor, counted element by element.
int64_t block_bytes(const Box& entry, const Box& part, int64_t element_size) {
  const at::Tensor numbers = at::arange(entry.numel()).view(entry.length);
  const at::Tensor positions = slice(numbers, part, entry.offset).flatten() * element_size;
  const at::Tensor blocks = std::get<0>(at::unique_consecutive(at::div(positions, kBlockBytes, "trunc")));
  int64_t total = 0;
  for (int64_t i = 0; i < blocks.numel(); ++i) {
    const int64_t block = blocks.const_data_ptr<int64_t>()[i];
    total += std::min(kBlockBytes, entry.numel() * element_size - block * kBlockBytes);
  }
  return total;
}

struct Written {
  Written(const Box& box, const at::Tensor& data) : box(box), data(data) {
    const auto written =
        write_rank_file(folder / "f", kIdentity, std::vector<PieceToWrite>{{"a", box, data}});
    file = std::make_unique<RankFile>(folder / "f", kIdentity, written.record);
  }

  // Reads `target_box` into a `target` with other contents, and compares all of it and the number of bytes
  // read.
  void check(const Box& target_box, at::Tensor target) const {
    const at::Tensor before = target.clone();
    const int64_t read_before = file->file().bytes_read();
    file->read("a", target_box, target);
    const Box both = intersection(box, target_box);
    at::Tensor expected = before;
    if (both.numel() > 0) slice(expected, both, target_box.offset).copy_(slice(data, both, box.offset));
    ASSERT_TRUE(same_bits(target, expected))
        << "at " << at::IntArrayRef(target_box.offset) << " of " << at::IntArrayRef(target_box.length);
    const int64_t bytes = both.numel() == 0 ? 0 : block_bytes(box, both, data.element_size());
    ASSERT_EQ(file->file().bytes_read() - read_before, bytes);
  }

  TempFolder folder;
  Box box;
  at::Tensor data;
  std::unique_ptr<RankFile> file;
};

at::Tensor filled(at::IntArrayRef shape, at::ScalarType dtype) {
  return at::full(shape, 77, at::dtype(dtype));
}

// All boxes within [0, limit) of each dimension, including empty ones and ones that miss the entry.
TEST(RankFileParts, ReadsEveryBoxOfASmallTensor) {
  const Written written(box_at({1, 2}, {3, 4}), sample(at::kFloat, {3, 4}));
  for (int64_t r = 0; r < 5; ++r)
    for (int64_t rows = 0; r + rows <= 5; ++rows)
      for (int64_t c = 0; c < 7; ++c)
        for (int64_t columns = 0; c + columns <= 7; ++columns) {
          written.check(box_at({r, c}, {rows, columns}), filled({rows, columns}, at::kFloat));
          written.check(box_at({r, c}, {rows, columns}), filled({columns, rows}, at::kFloat).t());
        }
}

TEST(RankFileParts, ReadsEveryBoxOfASmallCube) {
  const Written written(box_at({0, 1, 1}, {2, 2, 3}), sample(at::kBFloat16, {2, 2, 3}));
  std::vector<Box> ranges;
  for (int64_t begin = 0; begin < 4; ++begin)
    for (int64_t length = 0; begin + length <= 4; ++length) ranges.push_back(box_at({begin}, {length}));
  for (const Box& x : ranges)
    for (const Box& y : ranges)
      for (const Box& z : ranges) {
        const Box box =
            box_at({x.offset[0], y.offset[0], z.offset[0]}, {x.length[0], y.length[0], z.length[0]});
        written.check(box, filled(box.length, at::kBFloat16));
      }
}

TEST(RankFileParts, ReadsScalars) {
  Written(box_at({}, {}), at::scalar_tensor(3.5)).check(box_at({}, {}), at::scalar_tensor(0.0));
}

// Tensors of many blocks: parts begin and end within blocks and at their edges, and are read both through the
// buffer and directly.
TEST(RankFileParts, ReadsRandomBoxesOfLargeTensors) {
  std::mt19937_64 random(7);
  const auto draw = [&](int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
  };
  struct Case {
    std::vector<int64_t> shape;
    at::ScalarType dtype;
  };
  for (const Case& one : {Case{{11 * 1024 * 1024 + 7}, at::kByte}, Case{{1500, 1300}, at::kDouble},
                          Case{{3, 700, 801}, at::kBFloat16}, Case{{40000, 3, 2, 9}, at::kFloat}}) {
    Box box{{}, one.shape};
    for (size_t dim = 0; dim < one.shape.size(); ++dim) box.offset.push_back(draw(5));
    const Written written(box, sample(one.dtype, one.shape));
    written.check(box, filled(box.length, one.dtype));
    for (int trial = 0; trial < 4; ++trial) {
      Box wanted = box;
      for (size_t dim = 0; dim < one.shape.size(); ++dim) {
        if (draw(3) == 0) continue;  // all of it
        wanted.offset[dim] = draw(box.offset[dim] + box.length[dim]);
        wanted.length[dim] = 1 + draw(one.shape[dim]);
      }
      written.check(wanted, filled(wanted.length, one.dtype));
      std::vector<int64_t> wide = wanted.length;
      wide.back() *= 2;
      written.check(wanted, filled(wide, one.dtype).slice(-1, 0, wide.back(), 2));
    }
  }
}

// A rank's rows are whole blocks: exactly their bytes are read.
TEST(RankFileParts, ReadsOnlyTheBytesOfItsRows) {
  const Written written(box_at({0, 0}, {64, 65536}), sample(at::kFloat, {64, 65536}));
  const int64_t before = written.file->file().bytes_read();
  written.check(box_at({16, 0}, {16, 65536}), filled({16, 65536}, at::kFloat));
  EXPECT_EQ(written.file->file().bytes_read() - before, 16 * 65536 * 4);
}

TEST(RankFileParts, ReadsNothingBetweenDistantRuns) {
  const Written written(box_at({0, 0}, {4, 3 * 262144}), sample(at::kFloat, {4, 3 * 262144}));
  const int64_t before = written.file->file().bytes_read();
  written.check(box_at({0, 5}, {4, 10}), filled({4, 10}, at::kFloat));
  EXPECT_EQ(written.file->file().bytes_read() - before, 4 * kBlockBytes);
}

}  // namespace
}  // namespace titan::checkpoint
