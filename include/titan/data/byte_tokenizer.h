#pragma once

#include "titan/data/tokenizer.h"

namespace titan::data {

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
