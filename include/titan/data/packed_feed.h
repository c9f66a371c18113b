#pragma once

// Documents, tokenized and packed.
//
// Pieces are dealt in the order of a permutation keyed by (seed, epoch): counted through all epochs, the q-th
// piece goes to lane q mod num_lanes. A lane joins its pieces' tokens into one stream and takes seq_len + 1
// of them a sample, without overlap: the first seq_len are the inputs, the last seq_len the labels (as
// TorchTitan packs). Every piece begins with BOS, as its context does; EOS follows the last piece of a
// document only. A tokenizer without BOS or EOS leaves it out.

#include "titan/data/feed.h"
#include "titan/data/pieces.h"
#include "titan/data/tokenizer.h"

namespace titan::data {

struct PackingOptions {
  int64_t piece_bytes = 256 << 10;
  bool shuffle = true;
  uint64_t seed = 0;
  bool repeat = true;  ///< false: one epoch, then each lane that is through gives rows of label -100
};

class PackedFeed : public Feed {
 public:
  PackedFeed(std::shared_ptr<const Source> source, std::shared_ptr<const Tokenizer> tokenizer,
             const PackingOptions& options);

  void check_shape(int64_t num_lanes, int64_t seq_len) const override;
  LaneState start(int64_t lane, int64_t num_lanes) const override;
  std::unique_ptr<Lane> open(const LaneState& state, int64_t num_lanes) const override;

  /// No token is given twice: new lanes go on behind the foremost old one, and what slower lanes had left of
  /// the pieces before that place, the rest of the pieces in progress included, is passed over.
  std::vector<LaneState> redeal(const std::vector<LaneState>& lanes, int64_t num_lanes) const override;

  std::string fingerprint() const override;

  /// The piece dealt at `position` of `epoch`.
  Piece piece_at(int64_t epoch, int64_t position) const;
  /// Replaces `text` by the piece's.
  void read(const Piece& piece, std::string& text) const { pieces_.read(piece, text); }
  /// Appends the tokens of the block of the piece's text that begins at `begin`, BOS before the first and EOS
  /// after the last where they belong. Returns where the next block begins: text.size() at the end.
  size_t encode_block(const Piece& piece, std::string_view text, size_t begin,
                      std::vector<int32_t>& tokens) const;

  int64_t num_pieces() const { return pieces_.size(); }
  const PackingOptions& options() const { return options_; }

 private:
  PieceTable pieces_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  PackingOptions options_;
};

}  // namespace titan::data
