#pragma once

// Encoding a text whose tokens all have the same number of bytes: it can be cut between any two of them.

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "titan/data/tokenizer.h"

namespace titan::data {

class FixedWidthEncoder : public TextEncoder {
 public:
  /// `width`: bytes of a token. `tokenizer` and the memory of `text` must outlive it.
  FixedWidthEncoder(const Tokenizer& tokenizer, std::string_view text, size_t width)
      : tokenizer_(tokenizer), rest_(text), width_(width) {}

  bool encode_block(size_t bytes, std::vector<int32_t>& ids) override {
    const size_t count = std::min(rest_.size(), (bytes + width_ - 1) / width_ * width_);
    tokenizer_.encode_into(rest_.substr(0, count), ids);
    rest_.remove_prefix(count);
    return rest_.empty();
  }

 private:
  const Tokenizer& tokenizer_;
  std::string_view rest_;
  size_t width_;
};

}  // namespace titan::data
