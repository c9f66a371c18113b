#include "titan/data/pieces.h"

#include <algorithm>

#include "titan/core/error.h"
#include "utf8.h"

namespace titan::data {
namespace {

constexpr int64_t kLongestTail = 3;  // continuation bytes of a character

// Where the character begins at or after `at`. Damaged text may have none near: then the cut stays within
// kLongestTail bytes, on both sides of it alike.
int64_t move_to_character(std::string_view text, int64_t at) {
  int64_t moved = 0;
  auto size = static_cast<int64_t>(text.size());
  while (moved < kLongestTail && at + moved < size && !starts_character(text[at + moved])) ++moved;
  return at + moved;
}

}  // namespace

PieceTable::PieceTable(std::shared_ptr<const Source> source, int64_t piece_bytes)
    : source_(std::move(source)), piece_bytes_(piece_bytes) {
  TITAN_CHECK(piece_bytes > kLongestTail, "data.piece_bytes is ", piece_bytes, "; it has to exceed ",
              kLongestTail);
  int64_t num_documents = source_->size();
  for (int64_t i = 0; i < num_documents; ++i) {
    int64_t pieces = std::max<int64_t>(1, (source_->length(i) + piece_bytes_ - 1) / piece_bytes_);
    if (pieces > 1) long_documents_.push_back({i, size_, pieces});
    size_ += pieces;
  }
}

Piece PieceTable::at(int64_t index) const {
  auto after = std::upper_bound(long_documents_.begin(), long_documents_.end(), index,
                                [](int64_t i, const LongDocument& d) { return i < d.first_piece; });
  if (after == long_documents_.begin()) return {index, 0, true};
  const LongDocument& before = *(after - 1);
  int64_t within = index - before.first_piece;
  if (within < before.num_pieces) return {before.document, within, within + 1 == before.num_pieces};
  // Between long documents every document is one piece.
  return {before.document + 1 + within - before.num_pieces, 0, true};
}

void PieceTable::read(const Piece& piece, std::string& text) const {
  int64_t begin = piece.index * piece_bytes_;
  int64_t end = std::min(source_->length(piece.document), begin + piece_bytes_ + kLongestTail);
  source_->read(piece.document, begin, end - begin, text);
  if (!piece.is_last) text.resize(move_to_character(text, piece_bytes_));
  if (piece.index > 0) text.erase(0, move_to_character(text, 0));
}

}  // namespace titan::data
