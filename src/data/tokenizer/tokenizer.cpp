#include "titan/data/tokenizer.h"

#include "data/tokenizer/bpe_tokenizer.h"
#include "titan/core/error.h"

namespace titan::data {

void ByteTokenizer::encode_into(std::string_view text, std::vector<int32_t>& ids) const {
  for (char byte : text) ids.push_back(static_cast<unsigned char>(byte));
}

std::string ByteTokenizer::decode(std::span<const int32_t> ids) const {
  std::string text;
  for (int32_t id : ids) {
    TITAN_CHECK(id >= 0 && id < vocab_size(), "token id ", id, " is outside the vocabulary of ",
                vocab_size());
    if (id < kBos) text.push_back(static_cast<char>(id));
  }
  return text;
}

std::shared_ptr<const Tokenizer> build_tokenizer(const std::filesystem::path& assets) {
  if (assets == "bytes") return std::make_shared<ByteTokenizer>();
  bool is_folder = std::filesystem::is_directory(assets);
  auto file = is_folder ? assets / "tokenizer.json" : assets;
  if (!std::filesystem::exists(file))
    throw ConfigError(
        str("no tokenizer at '", file.string(), "': expected a folder with tokenizer.json, or \"bytes\""));
  return std::make_shared<BpeTokenizer>(file);
}

void check_vocabulary(const Tokenizer& tokenizer, int64_t model_vocab_size) {
  if (tokenizer.vocab_size() <= model_vocab_size) return;
  throw ConfigError(str("the tokenizer has ", tokenizer.vocab_size(),
                        " tokens but the model's vocabulary only ", model_vocab_size,
                        ": set model.args.vocab_size to at least ", tokenizer.vocab_size(),
                        " or choose another model.hf_assets_path"));
}

}  // namespace titan::data
