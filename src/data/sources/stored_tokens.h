#pragma once

// Token ids in files, made by another program: a file is one long row.
//
//   .npy   an array of one dimension, of uint16, uint32 or int32
//   .bin   with llm.c's header, which says how wide an id is; or without a header, as nanoGPT writes it

#include <cstdint>
#include <string>
#include <vector>

#include "data/sources/files.h"
#include "titan/data/source.h"
#include "titan/data/tokenizer.h"

namespace titan::data {

/// Every id counts as four bytes of a document, whatever its width in the file.
constexpr int64_t kStoredIdBytes = 4;

/// A document is a file.
class StoredTokens : public Source {
 public:
  /// Throws ConfigError if the request's path holds no .bin or .npy files, one has another form or size, or an
  /// id at a file's beginning, middle or end isn't below `vocab_size`. Reads no more than that.
  StoredTokens(const SourceRequest& request, int64_t vocab_size);

  int64_t size() const override { return static_cast<int64_t>(rows_.size()); }
  int64_t length(int64_t i) const override { return rows_[i].num_ids * kStoredIdBytes; }
  /// `text` becomes int32 ids. Throws ConfigError with the position of an id that isn't below the
  /// vocabulary's size.
  void read(int64_t i, int64_t begin, int64_t count, std::string& text) const override;
  std::string fingerprint() const override { return fingerprint_; }

 private:
  struct Row {
    FileEntry file;
    int64_t data_start;  ///< bytes
    int64_t width;       ///< bytes of an id
    int64_t num_ids;
    bool has_header;
  };
  static Row row_of(const FileEntry& file, const std::string& raw_type);
  void check_samples(const Row& row, int64_t i) const;

  std::vector<Row> rows_;
  int64_t vocab_size_;
  std::string fingerprint_;
};

/// The tokenizer of such documents: their bytes are the ids.
class StoredIds : public Tokenizer {
 public:
  explicit StoredIds(int64_t vocab_size) : vocab_size_(vocab_size) {}

  void encode_into(std::string_view text, std::vector<int32_t>& ids) const override;
  std::unique_ptr<TextEncoder> open(std::string_view text) const override;
  /// Throws Error: what the ids mean isn't known.
  std::string decode(std::span<const int32_t> ids) const override;
  int64_t vocab_size() const override { return vocab_size_; }
  std::optional<int32_t> bos_id() const override { return std::nullopt; }
  std::optional<int32_t> eos_id() const override { return std::nullopt; }
  std::string fingerprint() const override { return "stored ids"; }

 private:
  int64_t vocab_size_;
};

}  // namespace titan::data
