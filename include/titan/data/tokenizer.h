#pragma once

// Text to token ids and back.
//
// A tokenizer is immutable once built, and every call is thread-safe: the loader's threads share one.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace titan::data {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// Appends the ids of `text` to `ids`. Adds no BOS and no EOS: those belong to documents, and packing adds
  /// them.
  virtual void encode_into(std::string_view text, std::vector<int32_t>& ids) const = 0;

  /// The text of `ids`, special tokens included. Throws Error for an id outside [0, vocab_size()).
  virtual std::string decode(std::span<const int32_t> ids) const = 0;

  /// One more than the largest id.
  virtual int64_t vocab_size() const = 0;

  /// What stands before and after a document; none where the tokenizer has no such token.
  virtual std::optional<int32_t> bos_id() const = 0;
  virtual std::optional<int32_t> eos_id() const = 0;

  /// A short text that differs between tokenizers that may produce different ids.
  virtual std::string fingerprint() const = 0;

  std::vector<int32_t> encode(std::string_view text) const {
    std::vector<int32_t> ids;
    encode_into(text, ids);
    return ids;
  }
};

/// "bytes" gives a ByteTokenizer; anything else is a folder with a Hugging Face `tokenizer.json` (and perhaps
/// `tokenizer_config.json`), or the path of the former. Throws ConfigError when there is none or it isn't
/// understood.
std::shared_ptr<const Tokenizer> build_tokenizer(const std::filesystem::path& assets);

/// Throws ConfigError when the tokenizer can produce ids that a model with `model_vocab_size` embeddings has
/// no row for.
void check_vocabulary(const Tokenizer& tokenizer, int64_t model_vocab_size);

/// A token is a byte: ids 0..255, then BOS and EOS. Needs no files and keeps any input exactly, valid UTF-8
/// or not.
class ByteTokenizer : public Tokenizer {
 public:
  static constexpr int32_t kBos = 256;
  static constexpr int32_t kEos = 257;

  void encode_into(std::string_view text, std::vector<int32_t>& ids) const override;
  /// BOS and EOS have no text.
  std::string decode(std::span<const int32_t> ids) const override;
  int64_t vocab_size() const override { return 258; }
  std::optional<int32_t> bos_id() const override { return kBos; }
  std::optional<int32_t> eos_id() const override { return kEos; }
  std::string fingerprint() const override { return "bytes"; }
};

}  // namespace titan::data
