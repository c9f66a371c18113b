#include <gtest/gtest.h>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/utf8.h"
#include "data/feed/feeds.h"
#include "titan/core/error.h"
#include "titan/data/tokenizer.h"
#include "unit/data/fake_source.h"

namespace titan::data {
namespace {

std::vector<int64_t> all_of(int64_t n, uint64_t seed, uint64_t stream) {
  Permutation permutation(n, seed, stream);
  std::vector<int64_t> images(n);
  for (int64_t k = 0; k < n; ++k) images[k] = permutation(k);
  return images;
}

TEST(Permutation, IsABijectionOfAnySize) {
  for (int64_t n : {1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 1000, 4097, 100'003}) {
    std::vector<bool> seen(n);
    for (int64_t image : all_of(n, 5, 1)) {
      ASSERT_GE(image, 0);
      ASSERT_LT(image, n);
      ASSERT_FALSE(seen[image]) << image << " twice for n = " << n;
      seen[image] = true;
    }
  }
}

TEST(Permutation, DependsOnSeedAndStreamOnly) {
  EXPECT_EQ(all_of(1000, 1, 2), all_of(1000, 1, 2));
  EXPECT_NE(all_of(1000, 1, 2), all_of(1000, 1, 3));
  EXPECT_NE(all_of(1000, 1, 2), all_of(1000, 2, 2));
}

// The order is part of what makes a run repeatable, on any machine and in any later version.
TEST(Permutation, KeepsItsValues) {
  EXPECT_EQ(all_of(8, 0, 0), (std::vector<int64_t>{4, 6, 5, 0, 2, 3, 7, 1}));
  EXPECT_EQ(Permutation(int64_t{1} << 40, 42, 7)(123456789), 1011797187926);
}

TEST(Permutation, LooksRandom) {
  constexpr int64_t n = 20'000;
  auto images = all_of(n, 9, 0);
  double mean_step = 0;
  for (int64_t k = 0; k + 1 < n; ++k)
    mean_step += std::abs(static_cast<double>(images[k + 1] - images[k])) / (n - 1);
  EXPECT_NEAR(mean_step / n, 1.0 / 3, 0.01);  // as for independent uniform numbers
  // The first tenth of the order covers the whole range evenly.
  std::vector<int> counts(10);
  for (int64_t k = 0; k < n / 10; ++k) ++counts[images[k] * 10 / n];
  for (int count : counts) EXPECT_NEAR(count, n / 100, 60);
}

TEST(Permutation, RefusesAnEmptyRange) { EXPECT_THROW(Permutation(0, 0, 0), Error); }

TEST(Pieces, JoinIntoTheDocuments) {
  std::vector<std::string> documents = {
      "short", std::string(100, 'a'), "", std::string(16, 'b'), std::string(17, 'c'), "end"};
  std::string mixed;
  for (int i = 0; i < 40; ++i) mixed += i % 3 == 0 ? "é" : i % 3 == 1 ? "字" : "😀x";
  documents.push_back(mixed);
  documents.push_back(std::string(70, '\x80'));  // no character begins anywhere
  PieceTable pieces(std::make_shared<FakeSource>(documents), 16, std::make_shared<ByteTokenizer>());
  std::vector<std::string> joined(documents.size());
  std::string text;
  for (int64_t i = 0; i < pieces.size(); ++i) {
    Piece piece = pieces.at(i);
    pieces.read(piece, text);
    EXPECT_LE(text.size(), 19u);
    if (piece.document == 6) {
      EXPECT_EQ(valid_utf8_prefix(text), text.size()) << "a character was split";
    }
    joined[piece.document] += text;
    bool last = i + 1 == pieces.size() || pieces.at(i + 1).document != piece.document;
    EXPECT_EQ(piece.is_last, last) << i;
  }
  EXPECT_EQ(joined, documents);
}

TEST(Pieces, ShortDocumentsAreOnePieceEach) {
  PieceTable pieces(std::make_shared<FakeSource>(std::vector<std::string>(10, "abc")), 1000, nullptr);
  ASSERT_EQ(pieces.size(), 10);
  for (int64_t i = 0; i < 10; ++i) EXPECT_EQ(pieces.at(i).document, i);
}

TEST(Pieces, ReadingOneReadsNothingElse) {
  auto source = std::make_shared<FakeSource>(std::vector<std::string>{std::string(1000, 'x')});
  PieceTable pieces(source, 100, nullptr);
  std::string text;
  pieces.read(pieces.at(7), text);
  EXPECT_EQ(source->reads(), (std::vector<std::pair<int64_t, int64_t>>{{0, 700}}));
}

}  // namespace
}  // namespace titan::data
