#pragma once

// Documents cut into pieces: the unit that is dealt to lanes, so that one file of a gigabyte feeds all lanes
// evenly.

#include <memory>
#include <string>
#include <vector>

#include "titan/data/source.h"

namespace titan::data {

/// A part of a document. Cuts lie `piece_bytes` apart and move up to three bytes forward so as not to split a
/// character.
struct Piece {
  int64_t document;
  int64_t index;  ///< which of the document's pieces
  bool is_last;   ///< of the document
};

/// All pieces of a source, in order. Immutable and thread-safe; its memory grows only with the number of
/// documents that are longer than a piece.
class PieceTable {
 public:
  PieceTable(std::shared_ptr<const Source> source, int64_t piece_bytes);

  int64_t size() const { return size_; }
  Piece at(int64_t index) const;

  /// Replaces `text` by the piece's.
  void read(const Piece& piece, std::string& text) const;

  const Source& source() const { return *source_; }

 private:
  struct LongDocument {
    int64_t document;
    int64_t first_piece;
    int64_t num_pieces;
  };

  std::shared_ptr<const Source> source_;
  int64_t piece_bytes_;
  int64_t size_ = 0;
  std::vector<LongDocument> long_documents_;
};

}  // namespace titan::data
