#include "titan/data/pieces.h"

#include <gtest/gtest.h>

#include "data/utf8.h"
#include "fake_source.h"

namespace titan::data {
namespace {

TEST(Pieces, PutTogetherAgainAreTheDocuments) {
  std::vector<std::string> documents = {
      "short", std::string(100, 'a'), "", std::string(16, 'b'), std::string(17, 'c'), "end"};
  std::string mixed;
  for (int i = 0; i < 40; ++i) mixed += i % 3 == 0 ? "é" : i % 3 == 1 ? "字" : "😀x";
  documents.push_back(mixed);
  documents.push_back(std::string(70, '\x80'));  // no character begins anywhere
  PieceTable pieces(std::make_shared<FakeSource>(documents), 16);
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

TEST(Pieces, WithoutLongDocumentsArePlainlyTheDocuments) {
  PieceTable pieces(std::make_shared<FakeSource>(std::vector<std::string>(10, "abc")), 1000);
  ASSERT_EQ(pieces.size(), 10);
  for (int64_t i = 0; i < 10; ++i) EXPECT_EQ(pieces.at(i).document, i);
}

TEST(Pieces, OnlyWhatIsAskedForIsRead) {
  auto source = std::make_shared<FakeSource>(std::vector<std::string>{std::string(1000, 'x')});
  PieceTable pieces(source, 100);
  std::string text;
  pieces.read(pieces.at(7), text);
  EXPECT_EQ(source->reads(), (std::vector<std::pair<int64_t, int64_t>>{{0, 700}}));
}

}  // namespace
}  // namespace titan::data
