#pragma once

// Byte-level byte-pair encoding as in Hugging Face's `tokenizer.json` (GPT-2, Llama 3, Qwen 2, DeepSeek,
// ...).
//
// U+FFFD replaces invalid UTF-8; added tokens ("<|end_of_text|>") are cut out; pre-tokenizers split the rest
// into words; the bytes of each word are merged pair by pair, lowest rank first. The result equals the
// `tokenizers` package token for token, which scripts/compare_tokenizers.py checks.

#include <array>
#include <mutex>

#include "titan/data/tokenizer.h"

namespace titan::data {

namespace bpe {
struct Definition;
struct Context;
}  // namespace bpe

class BpeTokenizer : public Tokenizer {
 public:
  /// Reads `tokenizer_json`, and BOS and EOS from a `tokenizer_config.json` beside it (or else from the
  /// post-processor's template). Throws ConfigError with the file and the part that isn't supported: a model
  /// other than byte-level BPE, a normalizer, a pre-tokenizer other than ByteLevel, Split, Digits and
  /// sequences of them, or a pattern that PCRE2 reads differently. Ignores truncation and padding, because
  /// packing determines lengths.
  explicit BpeTokenizer(const std::filesystem::path& tokenizer_json);
  ~BpeTokenizer() override;

  /// Throws Error if the split pattern exceeds its match limit on this text.
  void encode_into(std::string_view text, std::vector<int32_t>& ids) const override;
  std::unique_ptr<TextEncoder> open(std::string_view text) const override;
  /// U+FFFD replaces bytes that aren't valid UTF-8 (a character cut in two).
  std::string decode(std::span<const int32_t> ids) const override;
  int64_t vocab_size() const override;
  std::optional<int32_t> bos_id() const override;
  std::optional<int32_t> eos_id() const override;
  std::string fingerprint() const override;

 private:
  class Encoder;
  std::unique_ptr<bpe::Context> borrow_context() const;

  std::unique_ptr<const bpe::Definition> definition_;
  // Each call borrows a context (regex stack, word cache, buffers) and returns it, so that there are as many
  // as threads encoding at the same time, and a cache stays warm between documents.
  mutable std::mutex idle_mutex_;
  mutable std::vector<std::unique_ptr<bpe::Context>> idle_;
};

/// The code point of each byte in GPT-2's printable alphabet, in which a vocabulary file writes every byte as
/// one visible character ("Ġ" is a space).
const std::array<char32_t, 256>& byte_alphabet();

}  // namespace titan::data
