// An input is a tokenizer.json, a line "====", and a tokenizer_config.json. The tokenizer then encodes text.

#include "data/tokenizer/bpe_tokenizer.h"
#include "fuzz.h"
#include "scratch_folder.h"

namespace titan::fuzz {
namespace {

constexpr std::string_view kSeparator = "\n====\n";

void use(const data::BpeTokenizer& tokenizer) {
  std::vector<int32_t> ids;
  tokenizer.encode_into("It's a b<s>abc  \xC3\xA9\xE2\x82\xAC 12345\r\n\t\xFF", ids);
  for (int32_t id : ids) require(id >= 0 && id < tokenizer.vocab_size(), "an id is one of the vocabulary");
  tokenizer.decode(ids);
  for (auto id : {tokenizer.bos_id(), tokenizer.eos_id()})
    require(!id || (*id >= 0 && *id < tokenizer.vocab_size()), "BOS and EOS are tokens of the vocabulary");
}

}  // namespace

void fuzz_input(std::string_view input) {
  static const ScratchFolder folder;
  const size_t end = std::min(input.find(kSeparator), input.size());
  const std::string_view config = input.substr(std::min(end + kSeparator.size(), input.size()));
  const auto path = folder.write("tokenizer.json", input.substr(0, end));
  folder.write("tokenizer_config.json", config.empty() ? "{}" : config);
  std::unique_ptr<data::BpeTokenizer> tokenizer;
  if (!accepted(path.parent_path().string(), [&] { tokenizer = std::make_unique<data::BpeTokenizer>(path); }))
    return;
  // The error about a pattern that takes too many steps names the pattern, not the file.
  accepted("", [&] { use(*tokenizer); });
}

}  // namespace titan::fuzz
