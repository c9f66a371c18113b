#pragma once

// Byte-level byte-pair encoding as Hugging Face's `tokenizer.json` describes it (GPT-2, Llama 3, Qwen 2,
// DeepSeek ...).
//
// Text goes through: invalid UTF-8 -> U+FFFD; added tokens ("<|end_of_text|>") cut out; pre-tokenizers split
// the rest into words; each word's bytes are merged pair by pair, lowest rank first. Each of these equals the
// `tokenizers` package token for token, which scripts/compare_tokenizers.py checks.

#include <mutex>

#include "titan/data/tokenizer.h"

namespace titan::data {

namespace bpe {
struct Definition;
struct Context;
}  // namespace bpe

class BpeTokenizer : public Tokenizer {
 public:
  /// Reads `tokenizer_json`, and BOS and EOS from a `tokenizer_config.json` beside it (else from the
  /// post-processor's template). Throws ConfigError with the file and the part that isn't understood: another
  /// model than byte-level BPE, a normalizer, a pre-tokenizer other than ByteLevel, Split, Digits and
  /// sequences of them, a pattern that PCRE2 reads differently. Truncation and padding in the file are
  /// ignored: packing decides lengths.
  explicit BpeTokenizer(const std::filesystem::path& tokenizer_json);
  ~BpeTokenizer() override;

  /// Throws Error when the split pattern exceeds its match limit on this text.
  void encode_into(std::string_view text, std::vector<int32_t>& ids) const override;
  /// Bytes that don't make valid UTF-8 (a character cut in two) decode to U+FFFD.
  std::string decode(std::span<const int32_t> ids) const override;
  int64_t vocab_size() const override;
  std::optional<int32_t> bos_id() const override;
  std::optional<int32_t> eos_id() const override;
  std::string fingerprint() const override;

 private:
  class Lease;
  void encode_plain(std::string_view text, bpe::Context& context, std::vector<int32_t>& ids) const;

  std::unique_ptr<const bpe::Definition> definition_;
  // A call borrows a context (regex stack, word cache, buffers) and puts it back, so that there are as many
  // as threads encoding at the same time, and a cache stays warm from one document to the next.
  mutable std::mutex idle_mutex_;
  mutable std::vector<std::unique_ptr<bpe::Context>> idle_;
};

}  // namespace titan::data
