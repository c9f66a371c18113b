#include "titan/tensor/placement.h"

#include <sstream>

#include <gtest/gtest.h>

#include "titan/core/error.h"

namespace titan {
namespace {

std::vector<int64_t> lengths(int64_t size, int64_t parts) {
  std::vector<int64_t> result;
  for (int64_t part = 0; part < parts; ++part) result.push_back(chunk_of(size, parts, part).length);
  return result;
}

using Lengths = std::vector<int64_t>;

TEST(Placement, ChunksEqualTorchs) {
  EXPECT_EQ(lengths(8, 4), (Lengths{2, 2, 2, 2}));
  EXPECT_EQ(lengths(7, 4), (Lengths{2, 2, 2, 1}));
  EXPECT_EQ(lengths(5, 4), (Lengths{2, 2, 1, 0}));
  EXPECT_EQ(lengths(2, 4), (Lengths{1, 1, 0, 0}));
  EXPECT_EQ(lengths(0, 3), (Lengths{0, 0, 0}));
  EXPECT_EQ(lengths(250, 4), (Lengths{63, 63, 63, 61}));
}

TEST(Placement, ChunksTileTheWhole) {
  for (int64_t size : {0, 1, 2, 3, 7, 16, 250}) {
    for (int64_t parts = 1; parts <= 9; ++parts) {
      int64_t position = 0;
      for (int64_t part = 0; part < parts; ++part) {
        Chunk chunk = chunk_of(size, parts, part);
        EXPECT_EQ(chunk.offset, position);
        EXPECT_LE(chunk.length, padded_chunk_length(size, parts));
        position += chunk.length;
      }
      EXPECT_EQ(position, size);
    }
  }
}

TEST(Placement, RefusesWrongParts) {
  EXPECT_THROW(chunk_of(4, 0, 0), Error);
  EXPECT_THROW(chunk_of(4, 2, 2), Error);
  EXPECT_THROW(chunk_of(4, 2, -1), Error);
  EXPECT_THROW(padded_chunk_length(-1, 2), Error);
}

TEST(Placement, BoxCountsElements) {
  EXPECT_EQ((Box{{1, 2}, {3, 4}}.numel()), 12);
  EXPECT_EQ((Box{{1, 2}, {3, 0}}.numel()), 0);
  EXPECT_EQ(Box{}.numel(), 1);  // a scalar
}

TEST(Placement, Prints) {
  std::ostringstream out;
  out << Placement::shard(1) << ' ' << Placement::replicate() << ' ' << Placement::partial();
  EXPECT_EQ(out.str(), "Shard(1) Replicate Partial");
}

}  // namespace
}  // namespace titan
