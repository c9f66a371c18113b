#include "data/tokenizer/tokenizer_json.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/utf8.h"
#include "data/tokenizer/pre_tokenizer.h"
#include "titan/core/error.h"

namespace titan::data {

namespace {

size_t pair_of(char first, char second) {
  return static_cast<size_t>(static_cast<unsigned char>(first)) << 8 | static_cast<unsigned char>(second);
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::stable_sort(tokens_.begin(), tokens_.end(),
                   [](const auto& a, const auto& b) { return a.content.size() > b.content.size(); });
  if (tokens_.empty()) return;
  char first = tokens_[0].content[0];
  if (std::all_of(tokens_.begin(), tokens_.end(),
                  [&](const auto& token) { return token.content[0] == first; }))
    only_first_byte_ = static_cast<unsigned char>(first);
  for (const auto& [content, id] : tokens_) {
    if (content.size() > 1)
      begins_.set(pair_of(content[0], content[1]));
    else
      for (int second = 0; second < 256; ++second)
        begins_.set(pair_of(content[0], static_cast<char>(second)));
  }
}

bool AddedTokens::may_begin(std::string_view text, size_t position) const {
  if (position + 1 == text.size()) return true;
  return begins_[pair_of(text[position], text[position + 1])];
}

const AddedToken* AddedTokens::match_at(std::string_view text, size_t position) const {
  for (const auto& token : tokens_)
    if (text.compare(position, token.content.size(), token.content) == 0) return &token;
  return nullptr;
}

const AddedToken* AddedTokens::find(std::string_view text, size_t start, size_t& begin) const {
  if (tokens_.empty()) return nullptr;
  for (size_t position = start; position < text.size(); ++position) {
    if (only_first_byte_ >= 0) {
      position = text.find(static_cast<char>(only_first_byte_), position);
      if (position == text.npos) return nullptr;
    }
    if (!may_begin(text, position)) continue;
    const AddedToken* token = match_at(text, position);
    if (!token) continue;
    begin = position;
    return token;
  }
  return nullptr;
}

namespace {

constexpr char32_t kAlphabetEnd = 0x100 + 68;  // 68 bytes have no visible character

// Visible Latin-1 characters represent themselves; the other bytes are U+0100 and up, in order.
constexpr std::array<char32_t, 256> make_alphabet() {
  std::array<char32_t, 256> alphabet{};
  char32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    bool visible = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    alphabet[byte] = visible ? static_cast<char32_t>(byte) : next++;
  }
  return alphabet;
}

constexpr std::array<char32_t, 256> kAlphabet = make_alphabet();

constexpr std::array<int, kAlphabetEnd> make_inverse() {
  std::array<int, kAlphabetEnd> inverse{};
  for (int& byte : inverse) byte = -1;
  for (int byte = 0; byte < 256; ++byte) inverse[kAlphabet[byte]] = byte;
  return inverse;
}

constexpr std::array<int, kAlphabetEnd> kInverse = make_inverse();

}  // namespace

const std::array<char32_t, 256>& byte_alphabet() { return kAlphabet; }

std::optional<std::string> bytes_from_alphabet(std::string_view token) {
  std::string bytes;
  for (size_t position = 0; position < token.size();) {
    char32_t c = next_code_point(token, position);
    if (c >= kAlphabetEnd || kInverse[c] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(kInverse[c]));
  }
  return bytes;
}

}  // namespace titan::data

namespace titan::data::bpe {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

// Reads one file into a Definition.
class Reader {
 public:
  Reader(const fs::path& path, const std::string& text, Definition& out) : file_(path, text), out_(out) {}

  void read() {
    check_model();
    check_normalizer();
    check_decoder();
    read_vocabulary();
    read_merges();
    read_added_tokens();
    out_.pre_tokenizer = read_pre_tokenizer(file_);
    fill_decoding();
    read_template();
    read_config();
  }

 private:
  void check_model() const {
    const Json& model = file_.need(file_.tree(), "model");
    std::string type = file_.get<std::string>(model, "type", "BPE");
    if (type != "BPE")
      file_.refuse(str("model type '", type, "' is not supported; supported: BPE (byte-level)"));
    if (file_.get(model, "byte_fallback", false))
      file_.refuse("byte_fallback is not supported: it isn't byte-level BPE");
    if (file_.get(model, "dropout", 0.0) != 0)
      file_.refuse("dropout would make data random; remove it from the model");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (!file_.get<std::string>(model, key, "").empty()) file_.refuse(str(key, " is not supported"));
  }

  void check_normalizer() const {
    const Json* part = JsonFile::find(file_.tree(), "normalizer");
    if (!part || (file_.type_of(*part) == "Sequence" && file_.need(*part, "normalizers").empty())) return;
    file_.refuse(str("normalizer '", file_.type_of(*part), "' is not supported; supported: none"));
  }

  void check_decoder() const {
    const Json* part = JsonFile::find(file_.tree(), "decoder");
    while (part && file_.type_of(*part) == "Sequence" && file_.need(*part, "decoders").size() == 1)
      part = &file_.need(*part, "decoders")[0];
    if (!part || file_.type_of(*part) != "ByteLevel")
      file_.refuse(
          str("decoder '", part ? file_.type_of(*part) : "none", "' is not supported; supported: ByteLevel"));
  }

  void read_vocabulary() {
    const Json& vocabulary = file_.need(file_.need(file_.tree(), "model"), "vocab");
    if (!vocabulary.is_object()) file_.refuse("model.vocab is not an object of tokens and ids");
    for (const auto& [token, id] : vocabulary.items()) name_id(token, id);
    read_byte_ids();
    if (!file_.get(file_.need(file_.tree(), "model"), "ignore_merges", false)) return;
    for (const auto& [token, id] : ids_)
      if (auto bytes = bytes_from_alphabet(token)) out_.whole_words.emplace(*bytes, id);
  }

  void name_id(const std::string& token, const Json& id) {
    constexpr int64_t kLargest = 1 << 28;  // far above any vocabulary
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() > kLargest)
      file_.refuse(str("token '", token, "' has the id ", id.dump()));
    ids_[token] = id.get<int32_t>();
  }

  void read_byte_ids() {
    for (int byte = 0; byte < 256; ++byte) {
      std::string token;
      append_utf8(byte_alphabet()[byte], token);
      auto found = ids_.find(token);
      out_.byte_ids[byte] = found == ids_.end() ? -1 : found->second;
      bool occurs = byte != 0xC0 && byte != 0xC1 && byte < 0xF5;
      if (occurs && found == ids_.end())
        file_.refuse(str("the vocabulary has no token for byte ", byte, ": it isn't byte-level BPE"));
    }
  }

  int32_t id_of(const std::string& token, const char* where) const {
    auto found = ids_.find(token);
    if (found == ids_.end()) file_.refuse(str(where, " names '", token, "', which is not in the vocabulary"));
    return found->second;
  }

  void read_merges() {
    const Json& merges = file_.need(file_.need(file_.tree(), "model"), "merges");
    if (!merges.is_array()) file_.refuse("model.merges is not a list");
    out_.merges = MergeTable(merges.size());
    uint32_t rank = 0;
    for (const Json& merge : merges) {
      auto [left, right] = pair_of(merge);
      int32_t merged = id_of(left + right, "a merge");
      out_.merges.add(id_of(left, "a merge"), id_of(right, "a merge"), {rank++, merged});
    }
  }

  // ["a", "b"], or "a b" in files of older versions.
  std::pair<std::string, std::string> pair_of(const Json& merge) const {
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string())
      return {merge[0].get<std::string>(), merge[1].get<std::string>()};
    if (merge.is_string()) {
      auto text = merge.get<std::string>();
      size_t space = text.find(' ');
      if (space != text.npos && text.find(' ', space + 1) == text.npos)
        return {text.substr(0, space), text.substr(space + 1)};
    }
    file_.refuse(str("a merge is neither a pair nor two words: ", merge.dump().substr(0, 80)));
  }

  void read_added_tokens() {
    std::vector<AddedToken> special, normalized;
    const Json* tokens = JsonFile::find(file_.tree(), "added_tokens");
    for (const Json& token : tokens ? *tokens : Json::array()) {
      auto content = file_.get<std::string>(token, "content", "");
      if (content.empty()) file_.refuse("an added token without content");
      for (const char* key : {"single_word", "lstrip", "rstrip"})
        if (file_.get(token, key, false))
          file_.refuse(str("added token '", content, "' has ", key, ", which is not supported"));
      name_id(content, file_.need(token, "id"));
      (file_.get(token, "normalized", !file_.get(token, "special", false)) ? normalized : special)
          .push_back({content, ids_[content]});
    }
    out_.special_tokens = AddedTokens(std::move(special));
    out_.normalized_tokens = AddedTokens(std::move(normalized));
  }

  void fill_decoding() {
    // Ids may have gaps, but one id must not make the table much larger than the vocabulary.
    const size_t most = 4 * ids_.size() + 4096;
    for (const auto& [token, id] : ids_) {
      if (static_cast<size_t>(id) >= most)
        file_.refuse(str("token '", token, "' has the id ", id, "; at most ", most - 1,
                         " is allowed in a vocabulary of ", ids_.size()));
      if (static_cast<size_t>(id) >= out_.bytes_of_id.size()) out_.bytes_of_id.resize(id + 1);
      out_.bytes_of_id[id] = bytes_from_alphabet(token).value_or(token);
    }
  }

  // In TemplateProcessing of `single`, a special token before the sequence is BOS, one after it EOS.
  void read_template() {
    const Json* part = JsonFile::find(file_.tree(), "post_processor");
    if (!part) return;
    const Json* list = file_.type_of(*part) == "Sequence" ? &file_.need(*part, "processors") : nullptr;
    for (const Json& processor : list ? *list : Json::array({*part}))
      if (file_.type_of(processor) == "TemplateProcessing") read_single(file_.need(processor, "single"));
  }

  void read_single(const Json& single) {
    bool after = false;
    for (const Json& item : single) {
      if (item.contains("Sequence")) after = true;
      if (!item.contains("SpecialToken")) continue;
      int32_t id = id_of(file_.get<std::string>(item["SpecialToken"], "id", ""), "post_processor");
      (after ? out_.eos_id : out_.bos_id) = id;
    }
  }

  void read_config() {
    fs::path path = file_.path().parent_path() / "tokenizer_config.json";
    if (!fs::exists(path)) return;
    const JsonFile config(path, read_file(path));
    for (auto [key, id] : {std::pair{"bos_token", &out_.bos_id}, {"eos_token", &out_.eos_id}}) {
      const Json* token = JsonFile::find(config.tree(), key);
      if (!token) continue;
      // A string, or an object like an added token.
      auto content = token->is_object() ? config.get<std::string>(*token, "content", "")
                                        : config.get<std::string>(config.tree(), key, "");
      *id = id_of(content, "tokenizer_config.json");
    }
  }

  const JsonFile file_;
  Definition& out_;
  std::unordered_map<std::string, int32_t> ids_;
};

}  // namespace

std::unique_ptr<const Definition> read_definition(const fs::path& path) {
  if (!fs::exists(path)) throw ConfigError(str("no tokenizer at ", path.string()));
  auto definition = std::make_unique<Definition>();
  std::string text = read_file(path);
  try {
    Reader(path, text, *definition).read();
  } catch (const Json::exception& error) {  // a part has an unexpected shape
    throw ConfigError(str(path.string(), ": ", error.what()));
  }
  auto shown = [](std::optional<int32_t> id) { return id ? std::to_string(*id) : "none"; };
  definition->fingerprint =
      str("bpe:", definition->bytes_of_id.size(), " tokens:bos ", shown(definition->bos_id), ":eos ",
          shown(definition->eos_id), ":", hex(hash_bytes(text)));
  return definition;
}

}  // namespace titan::data::bpe
