#pragma once

// The feeds: packed documents, and recorded batches.
//
// [Note: packing]
// Pieces are dealt in the order of a permutation keyed by (seed, epoch). Counting through all epochs, the
// q-th piece goes to lane q mod num_lanes. A lane joins its pieces' tokens into one stream and takes
// seq_len + 1 of them per sample, without overlap: the first seq_len are the inputs, the last seq_len the
// labels (as TorchTitan packs). Every piece begins with BOS, because its context begins there; EOS follows
// only the last piece of a document. A tokenizer without BOS or EOS leaves them out.

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/file.h"
#include "data/sources/npy.h"
#include "titan/data/feed.h"

namespace titan::data {

/// A pseudo-random order of n things that takes no memory: a bijection of [0, n) chosen by (seed, stream). A
/// Feistel network over the smallest power of two that holds n is applied until the value falls inside (Black
/// and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The result is the same on every machine.
class Permutation {
 public:
  /// `n` at least 1.
  Permutation(int64_t n, uint64_t seed, uint64_t stream);

  /// The image of `k` in [0, n); takes at most about two network evaluations on average.
  int64_t operator()(int64_t k) const;

 private:
  static constexpr int kRounds = 8;
  uint64_t network(uint64_t x) const;

  uint64_t n_;
  int low_bits_;
  uint64_t low_mask_;
  uint64_t high_mask_;
  uint64_t keys_[kRounds];
};

/// A part of a document. Pieces, not documents, are dealt to lanes, so that one file of a gigabyte feeds all
/// lanes evenly. Cuts are `piece_bytes` apart, and move forward by up to a kilobyte to a place that leaves the
/// tokens around it as they are, or else by up to three bytes to avoid splitting a character. The last piece
/// may be longer by the room for that.
struct Piece {
  int64_t document;
  int64_t index;  ///< position among the document's pieces
  bool is_last;   ///< the document's last piece
};

/// All pieces of a source, in order. Immutable and thread-safe. Its memory grows only with the number of
/// documents longer than a piece.
class PieceTable {
 public:
  /// Cuts of text depend on its tokenizer. Without one, documents are stored token ids, and cuts don't move.
  PieceTable(std::shared_ptr<const Source> source, int64_t piece_bytes,
             std::shared_ptr<const Tokenizer> tokenizer);

  int64_t size() const { return size_; }
  Piece at(int64_t index) const;

  /// Replaces `text` with the piece's.
  void read(const Piece& piece, std::string& text) const;
  /// Replaces `text` with whole characters from the beginning of the piece, about `count` bytes.
  void read_sample(const Piece& piece, int64_t count, std::string& text) const;
  int64_t num_bytes() const { return num_bytes_; }

  const Source& source() const { return *source_; }

 private:
  struct LongDocument {
    int64_t document;
    int64_t first_piece;
    int64_t num_pieces;
  };

  std::shared_ptr<const Source> source_;
  int64_t piece_bytes_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  int64_t room_ = 0;  // bytes by which a cut may move
  int64_t size_ = 0;
  int64_t num_bytes_ = 0;
  std::vector<LongDocument> long_documents_;
};

struct PackingOptions {
  int64_t piece_bytes = 256 << 10;
  bool shuffle = true;
  uint64_t seed = 0;
  bool repeat = true;   ///< false: one epoch, then rows of label -100
  bool is_text = true;  ///< false: documents are stored token ids (stored_tokens.h)
};

class PackedFeed : public Feed {
 public:
  PackedFeed(std::shared_ptr<const Source> source, std::shared_ptr<const Tokenizer> tokenizer,
             const PackingOptions& options);

  void check_shape(int64_t num_lanes, int64_t seq_len) const override;
  LaneState start(int64_t lane, int64_t num_lanes) const override;
  std::unique_ptr<Lane> open(const LaneState& state, int64_t num_lanes) const override;

  /// Uses no token twice: new lanes continue after the foremost old one. Pieces that slower lanes had not
  /// reached before it, and the rest of pieces in progress, are skipped.
  std::vector<LaneState> redeal(const std::vector<LaneState>& lanes, int64_t num_lanes) const override;

  FeedSize measure() const override;
  std::string fingerprint() const override;

  /// The piece at `position` of `epoch`.
  Piece piece_at(int64_t epoch, int64_t position) const;
  /// Replaces `text` with the piece's.
  void read(const Piece& piece, std::string& text) const { pieces_.read(piece, text); }
  int64_t num_pieces() const { return pieces_.size(); }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const PackingOptions& options() const { return options_; }

 private:
  PieceTable pieces_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  PackingOptions options_;
};

/// "order was 'shuffled by 3', is now 'shuffled by 4'; ...", "" if nothing differs. Fingerprints with different
/// parts are shown whole.
std::string fingerprint_difference(std::string_view before, std::string_view now);

/// The difference between `before` and the fingerprint of build_feed(request), as far as it shows without
/// reading all data (quick_fingerprint).
std::string quick_difference(const FeedRequest& request, const std::string& before);

// ---- recorded batches, in NumPy's .npy files of little-endian int32

/// A three-dimensional int32 array in a mapped file. Immutable and thread-safe.
class NpyArray {
 public:
  /// Throws ConfigError like parse_npy_header.
  explicit NpyArray(const std::filesystem::path& path);

  const std::array<int64_t, 3>& shape() const { return header_.shape; }

  /// Copies element [i, j, :] to `row`, whose length is shape()[2].
  void read_row(int64_t i, int64_t j, std::span<int64_t> row) const;

  const std::filesystem::path& path() const { return path_; }
  std::string_view bytes() const { return file_.text(); }

 private:
  std::filesystem::path path_;
  MappedFile file_;
  NpyHeader header_;
};

/// Recorded batches, to repeat another framework's run exactly: a folder with `input.npy` and `labels.npy`,
/// int32 [steps, global batch, sequence]. Each row is a lane; nothing is shuffled or repeated.
class ReplayFeed : public Feed {
 public:
  /// Whether `path` is a folder with one of these files: data set "tokens" reads it as such. Elsewhere, it
  /// reads StoredTokens.
  static bool is_recording(const std::filesystem::path& path);

  /// Ids must be below `vocab_size`. After the last step, rows have no labels if `finite`; otherwise reading
  /// them throws Error.
  ReplayFeed(const std::filesystem::path& folder, int64_t vocab_size, bool finite);

  /// Throws ConfigError unless `num_lanes` and `seq_len` are the recording's.
  void check_shape(int64_t num_lanes, int64_t seq_len) const override;
  LaneState start(int64_t lane, int64_t num_lanes) const override;
  std::unique_ptr<Lane> open(const LaneState& state, int64_t num_lanes) const override;
  /// Throws ConfigError: a recording has one batch size.
  std::vector<LaneState> redeal(const std::vector<LaneState>& lanes, int64_t num_lanes) const override;
  std::optional<int64_t> num_steps() const override;
  FeedSize measure() const override;
  std::string fingerprint() const override { return fingerprint_; }

  /// Reads row `lane` of `step` and returns how many labels count.
  int64_t read(int64_t step, int64_t lane, Row row) const;

 private:
  NpyArray input_;
  NpyArray labels_;
  int64_t vocab_size_;
  bool finite_;
  std::string fingerprint_;
};

}  // namespace titan::data
