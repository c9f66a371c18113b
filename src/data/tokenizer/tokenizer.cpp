#include "titan/data/tokenizer.h"

#include <algorithm>
#include <utility>

#include "data/tokenizer/bpe_tokenizer.h"

namespace titan::data {
namespace {

class WholeTextEncoder : public TextEncoder {
 public:
  WholeTextEncoder(const Tokenizer& tokenizer, std::string_view text) : tokenizer_(tokenizer), text_(text) {}

  bool encode_block(size_t, std::vector<int32_t>& ids) override {
    tokenizer_.encode_into(std::exchange(text_, {}), ids);
    return true;
  }

 private:
  const Tokenizer& tokenizer_;
  std::string_view text_;
};

}  // namespace

std::unique_ptr<TextEncoder> Tokenizer::open(std::string_view text) const {
  return std::make_unique<WholeTextEncoder>(*this, text);
}

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

Registry<TokenizerFactory>& tokenizer_kinds() {
  // Made at first use, so that a user's shared object can add to it from a static initializer.
  static Registry<TokenizerFactory>& kinds = *[] {
    auto* built_in = new Registry<TokenizerFactory>("tokenizer");
    built_in->add("bytes", [](const std::string&) { return std::make_shared<ByteTokenizer>(); });
    return built_in;
  }();
  return kinds;
}

bool names_tokenizer_kind(std::string_view assets) {
  return tokenizer_kinds().contains(std::string(assets.substr(0, assets.find(':'))));
}

std::shared_ptr<const Tokenizer> build_tokenizer(const std::filesystem::path& assets) {
  if (names_tokenizer_kind(assets.string())) {
    const std::string text = assets.string();
    const size_t colon = std::min(text.find(':'), text.size());
    return tokenizer_kinds().get(text.substr(0, colon))(text.substr(std::min(colon + 1, text.size())));
  }
  bool is_folder = std::filesystem::is_directory(assets);
  auto file = is_folder ? assets / "tokenizer.json" : assets;
  if (!std::filesystem::exists(file))
    throw ConfigError(
        str("no tokenizer at '", file.string(),
            "': expected a folder with tokenizer.json, or the name of a kind of tokenizer, such as "
            "\"bytes\""));
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
