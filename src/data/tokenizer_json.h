#pragma once

// What a Hugging Face tokenizer.json says, checked and turned into tables.

#include <filesystem>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "added_tokens.h"
#include "merges.h"
#include "pre_tokenizer.h"

namespace titan::data::bpe {

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
