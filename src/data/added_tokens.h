#pragma once

// Tokens that text is searched for before it is split and merged: "<|begin_of_text|>".

#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace titan::data {

struct AddedToken {
  std::string content;
  int32_t id;
};

/// Finds added tokens in text: the leftmost, and of those that begin there the longest.
class AddedTokens {
 public:
  explicit AddedTokens(std::vector<AddedToken> tokens = {});

  /// The first token at or after `start`, its place in `begin`; null when there is none.
  const AddedToken* find(std::string_view text, size_t start, size_t& begin) const;

 private:
  const AddedToken* match_at(std::string_view text, size_t position) const;
  bool may_begin(std::string_view text, size_t position) const;

  std::vector<AddedToken> tokens_;  // longest first
  std::bitset<65536> begins_;       // by the first two bytes, so that a '<' of code costs no search
  int only_first_byte_ = -1;        // when all begin with the same byte, memchr finds it
};

}  // namespace titan::data
