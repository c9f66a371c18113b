#pragma once

// Text to token ids and back. A new tokenizer is a class and a name for model.hf_assets_path:
//
//   class Words : public Tokenizer { ... };  // encode_into, decode, vocab_size, bos_id, eos_id, fingerprint
//   tokenizer_kinds().add("words", [](const std::string& file) { return std::make_shared<Words>(file); });
//
// Then `hf_assets_path = "words:vocab.txt"` builds one from "vocab.txt".

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "titan/core/registry.h"

namespace titan::data {

/// Encodes one text a block at a time: a loader needs the first tokens of many long texts at once. Not
/// thread-safe.
class TextEncoder {
 public:
  virtual ~TextEncoder() = default;

  /// Appends the ids of at least `bytes` more bytes of the text, or of all the rest. Returns whether the text
  /// is at its end.
  virtual bool encode_block(size_t bytes, std::vector<int32_t>& ids) = 0;
};

/// Immutable and thread-safe, because the loader's threads share it.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// Appends the ids of `text` to `ids`, without BOS and EOS: packing adds those around documents.
  virtual void encode_into(std::string_view text, std::vector<int32_t>& ids) const = 0;

  /// The ids of all blocks together are those of encode_into. The tokenizer and the memory of `text` must
  /// outlive the encoder. Unless a tokenizer overrides it, the whole text is one block.
  virtual std::unique_ptr<TextEncoder> open(std::string_view text) const;

  /// The text of `ids`, including special tokens. Throws Error for an id outside [0, vocab_size()).
  virtual std::string decode(std::span<const int32_t> ids) const = 0;

  /// One more than the largest id.
  virtual int64_t vocab_size() const = 0;

  /// The tokens before and after a document, if the tokenizer has them.
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

/// One token per byte: ids 0 to 255, then BOS and EOS. Needs no files and keeps any input exactly, even
/// invalid UTF-8.
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

/// `argument` is the text after "name:" in model.hf_assets_path; "" if only the name is given.
using TokenizerFactory = std::function<std::shared_ptr<const Tokenizer>(const std::string& argument)>;

/// The kinds of tokenizer by name. Built in: "bytes" (ByteTokenizer).
Registry<TokenizerFactory>& tokenizer_kinds();

/// Whether `assets` is "name" or "name:argument" of a registered kind.
bool names_tokenizer_kind(std::string_view assets);

/// Builds the registered kind that `assets` names. Otherwise `assets` is a folder with a Hugging Face
/// `tokenizer.json` (and perhaps `tokenizer_config.json`), or the path of a `tokenizer.json`. Throws
/// ConfigError if it is missing or not supported.
std::shared_ptr<const Tokenizer> build_tokenizer(const std::filesystem::path& assets);

/// Throws ConfigError if the tokenizer can produce ids beyond the `model_vocab_size` rows of the embedding.
void check_vocabulary(const Tokenizer& tokenizer, int64_t model_vocab_size);

}  // namespace titan::data
