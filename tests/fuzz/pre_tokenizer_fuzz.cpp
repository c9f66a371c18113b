// An input is the `pre_tokenizer` of a tokenizer.json with its regular expressions, a line "====", and text
// that it splits.

#include "core/utf8.h"
#include "data/tokenizer/pre_tokenizer.h"
#include "fuzz.h"

namespace titan::fuzz {
namespace {

constexpr const char* kFile = "strange/tokenizer.json";
constexpr std::string_view kSeparator = "\n====\n";
constexpr size_t kMostText = 256;  // a hostile pattern may take a tenth of a second at each byte

// Whether the words make up exactly the text: nothing is left out or added.
bool keeps_text(const JsonFile& file) {
  const std::string json = file.tree().dump();
  return json.find("Removed") == json.npos && json.find("ByteLevel") == json.npos;
}

void split(const data::PreTokenizer& pre_tokenizer, std::string_view text, bool keeps) {
  data::PreTokenizer::Scratch scratch;
  std::string words;
  pre_tokenizer.split(text, scratch, [&](std::string_view word) {
    require(!word.empty(), "a word is not empty");
    require(valid_utf8_prefix(word) == word.size(), "characters stay whole");
    words += word;
  });
  require(!keeps || words == text, "the words make up the text");
}

}  // namespace

void fuzz_input(std::string_view input) {
  const size_t end = std::min(input.find(kSeparator), input.size());
  const std::string json = R"({"pre_tokenizer":)" + std::string(input.substr(0, end)) + "}";
  std::string text(input.substr(std::min(end + kSeparator.size(), input.size())));
  text = replace_invalid_utf8(text);
  text.resize(valid_utf8_prefix(text.substr(0, kMostText)));
  data::PreTokenizer pre_tokenizer;
  bool keeps = false;
  if (!accepted(kFile, [&] {
        const JsonFile file(kFile, json);
        pre_tokenizer = data::bpe::read_pre_tokenizer(file);
        keeps = keeps_text(file);
      }))
    return;
  accepted("", [&] { split(pre_tokenizer, text, keeps); });
}

}  // namespace titan::fuzz
