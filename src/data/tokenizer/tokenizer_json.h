#pragma once

// Tokens that text is searched for before it is split and merged: "<|begin_of_text|>".

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

// GPT-2's printable alphabet: a vocabulary file writes every byte as one visible character ("Ġ" is a space).

/// The code point that stands for each byte.
const std::array<char32_t, 256>& byte_alphabet();

/// The bytes that `token` stands for; nothing when it holds a character outside the alphabet.
std::optional<std::string> bytes_from_alphabet(std::string_view token);

}  // namespace titan::data

namespace titan::data::bpe {

// What a Hugging Face tokenizer.json says, checked and turned into tables.

/// Words to ids, asked with views.
struct WordHash {
  using is_transparent = void;
  size_t operator()(std::string_view word) const { return std::hash<std::string_view>()(word); }
};
using WordTable = std::unordered_map<std::string, int32_t, WordHash, std::equal_to<>>;

struct Definition {
  /// Token of each byte; -1 for bytes that valid UTF-8 never has and the vocabulary lacks.
  int32_t byte_ids[256];
  MergeTable merges;
  /// Words that are tokens, by their bytes; only filled with `ignore_merges`, where such a word is not
  /// merged.
  WordTable whole_words;
  PreTokenizer pre_tokenizer;
  /// Text is first searched for those that a normalizer must not touch, the parts between for the others.
  AddedTokens special_tokens;
  AddedTokens normalized_tokens;
  /// Bytes of each id, what decoding emits; ids that nothing names are empty.
  std::vector<std::string> bytes_of_id;
  std::optional<int32_t> bos_id;
  std::optional<int32_t> eos_id;
  std::string fingerprint;
};

/// Throws ConfigError with the path and the part that isn't understood.
std::unique_ptr<const Definition> read_definition(const std::filesystem::path& tokenizer_json);

}  // namespace titan::data::bpe
