#pragma once

// A Hugging Face tokenizer.json as tables.

#include <array>
#include <bitset>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/tokenizer/merges.h"
#include "data/tokenizer/pre_tokenizer.h"

namespace titan::data {

/// A token that is found in text before it is split and merged: "<|begin_of_text|>".
struct AddedToken {
  std::string content;
  int32_t id;
};

/// Finds added tokens in text: the leftmost, and among those the longest.
class AddedTokens {
 public:
  explicit AddedTokens(std::vector<AddedToken> tokens = {});

  /// The first token at or after `start`, with its position in `begin`, or nullptr.
  const AddedToken* find(std::string_view text, size_t start, size_t& begin) const;

 private:
  const AddedToken* match_at(std::string_view text, size_t position) const;
  bool may_begin(std::string_view text, size_t position) const;

  std::vector<AddedToken> tokens_;  // longest first
  std::bitset<65536> begins_;       // by the first two bytes, so that a '<' in code costs no search
  int only_first_byte_ = -1;        // if all begin with the same byte, memchr finds it
};

/// The code point of each byte in GPT-2's printable alphabet, in which a vocabulary file writes every byte as
/// one visible character ("Ġ" is a space).
const std::array<char32_t, 256>& byte_alphabet();

/// The bytes that `token` represents, unless it contains a character outside the alphabet.
std::optional<std::string> bytes_from_alphabet(std::string_view token);

}  // namespace titan::data

namespace titan::data::bpe {

/// Words to ids, with lookup by string_view.
struct WordHash {
  using is_transparent = void;
  size_t operator()(std::string_view word) const { return std::hash<std::string_view>()(word); }
};
using WordTable = std::unordered_map<std::string, int32_t, WordHash, std::equal_to<>>;

struct Definition {
  /// The token of each byte, or -1 for bytes that valid UTF-8 never contains and the vocabulary lacks.
  int32_t byte_ids[256];
  MergeTable merges;
  /// With `ignore_merges`: words that are tokens themselves and aren't merged, by their bytes.
  WordTable whole_words;
  PreTokenizer pre_tokenizer;
  /// Text is searched first for tokens that a normalizer must not change, then the parts between for the
  /// others.
  AddedTokens special_tokens;
  AddedTokens normalized_tokens;
  /// The bytes of each id, for decoding; empty for unused ids.
  std::vector<std::string> bytes_of_id;
  std::optional<int32_t> bos_id;
  std::optional<int32_t> eos_id;
  std::string fingerprint;
};

/// Throws ConfigError with the path and the part that isn't supported.
std::unique_ptr<const Definition> read_definition(const std::filesystem::path& tokenizer_json);

}  // namespace titan::data::bpe
