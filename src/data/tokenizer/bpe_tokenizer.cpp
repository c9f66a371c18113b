#include "data/tokenizer/bpe_tokenizer.h"

#include <algorithm>
#include <bitset>
#include <unordered_map>

#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/utf8.h"
#include "data/tokenizer/merges.h"
#include "data/tokenizer/pre_tokenizer.h"
#include "titan/core/error.h"

namespace titan::data {
namespace {

/// A token that is found in text before it is split and merged: "<|begin_of_text|>".
struct AddedToken {
  std::string content;
  int32_t id;
};

/// Finds added tokens in text: the leftmost, and among those the longest.
class AddedTokens {
 public:
  explicit AddedTokens(std::vector<AddedToken> tokens = {}) : tokens_(std::move(tokens)) {
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

  /// The first token at or after `start`, with its position in `begin`, or nullptr.
  const AddedToken* find(std::string_view text, size_t start, size_t& begin) const {
    if (tokens_.empty()) return nullptr;
    for (begin = start; begin < text.size(); ++begin) {
      if (only_first_byte_ >= 0) {
        begin = text.find(static_cast<char>(only_first_byte_), begin);
        if (begin == text.npos) return nullptr;
      }
      if (begin + 1 < text.size() && !begins_[pair_of(text[begin], text[begin + 1])]) continue;
      for (const auto& token : tokens_)
        if (text.compare(begin, token.content.size(), token.content) == 0) return &token;
    }
    return nullptr;
  }

 private:
  static size_t pair_of(char first, char second) {
    return static_cast<size_t>(static_cast<unsigned char>(first)) << 8 | static_cast<unsigned char>(second);
  }

  std::vector<AddedToken> tokens_;  // longest first
  std::bitset<65536> begins_;       // by the first two bytes, so that a '<' in code costs no search
  int only_first_byte_ = -1;        // if all begin with the same byte, memchr finds it
};

// ---- the alphabet of a vocabulary file

constexpr char32_t kAlphabetEnd = 0x100 + 68;  // 68 bytes have no visible character

// Visible Latin-1 characters represent themselves; the other bytes are U+0100 and up, in order.
constexpr std::array<char32_t, 256> kAlphabet = [] {
  std::array<char32_t, 256> alphabet{};
  char32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    bool visible = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    alphabet[byte] = visible ? static_cast<char32_t>(byte) : next++;
  }
  return alphabet;
}();

constexpr std::array<int, kAlphabetEnd> kInverse = [] {
  std::array<int, kAlphabetEnd> inverse{};
  for (int& byte : inverse) byte = -1;
  for (int byte = 0; byte < 256; ++byte) inverse[kAlphabet[byte]] = byte;
  return inverse;
}();

/// The bytes that `token` represents, unless it contains a character outside the alphabet.
std::optional<std::string> bytes_from_alphabet(std::string_view token) {
  std::string bytes;
  for (size_t position = 0; position < token.size();) {
    char32_t c = next_code_point(token, position);
    if (c >= kAlphabetEnd || kInverse[c] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(kInverse[c]));
  }
  return bytes;
}

}  // namespace

const std::array<char32_t, 256>& byte_alphabet() { return kAlphabet; }

namespace bpe {

// ---- a Hugging Face tokenizer.json as tables

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

/// The memory for encoding one text.
struct Context {
  PreTokenizer::Scratch split;
  WordCache cache;
  WordMerger merger;
  std::vector<int32_t> word;
};

namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

// Reads one file into a Definition.
class Reader {
 public:
  Reader(const fs::path& path, const std::string& text, Definition& out)
      : file_(path, text), model_(file_.need(file_.tree(), "model")), out_(out) {}

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
    std::string type = file_.get<std::string>(model_, "type", "BPE");
    if (type != "BPE")
      file_.refuse(str("model type '", type, "' is not supported; supported: BPE (byte-level)"));
    if (file_.get(model_, "byte_fallback", false))
      file_.refuse("byte_fallback is not supported: it isn't byte-level BPE");
    if (file_.get(model_, "dropout", 0.0) != 0)
      file_.refuse("dropout would make data random; remove it from the model");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (!file_.get<std::string>(model_, key, "").empty()) file_.refuse(str(key, " is not supported"));
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
    const Json& vocabulary = file_.need(model_, "vocab");
    if (!vocabulary.is_object()) file_.refuse("model.vocab is not an object of tokens and ids");
    for (const auto& [token, id] : vocabulary.items()) name_id(token, id);
    read_byte_ids();
    if (!file_.get(model_, "ignore_merges", false)) return;
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
      append_utf8(kAlphabet[byte], token);
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
    const Json& merges = file_.need(model_, "merges");
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
  const Json& model_;
  Definition& out_;
  std::unordered_map<std::string, int32_t> ids_;
};

/// Throws ConfigError with the path and the part that isn't supported.
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

// ---- encoding

void encode_word(const Definition& definition, std::string_view word, Context& context,
                 std::vector<int32_t>& ids) {
  if (context.cache.append(word, ids)) return;
  auto& tokens = context.word;
  tokens.clear();
  auto whole = definition.whole_words.find(word);
  if (whole != definition.whole_words.end()) {
    tokens.push_back(whole->second);
  } else {
    for (char byte : word) tokens.push_back(definition.byte_ids[static_cast<unsigned char>(byte)]);
    context.merger.merge(definition.merges, tokens);
  }
  context.cache.remember(word, tokens);
  ids.insert(ids.end(), tokens.begin(), tokens.end());
}

}  // namespace
}  // namespace bpe

BpeTokenizer::BpeTokenizer(const std::filesystem::path& tokenizer_json)
    : definition_(bpe::read_definition(tokenizer_json)) {}

BpeTokenizer::~BpeTokenizer() = default;

std::unique_ptr<bpe::Context> BpeTokenizer::borrow_context() const {
  std::lock_guard lock(idle_mutex_);
  if (idle_.empty()) return std::make_unique<bpe::Context>();
  auto context = std::move(idle_.back());
  idle_.pop_back();
  return context;
}

/// Goes through the text once: added tokens, and between them the words of plain parts.
class BpeTokenizer::Encoder : public TextEncoder {
 public:
  Encoder(const BpeTokenizer& tokenizer, std::string_view text)
      : tokenizer_(tokenizer), definition_(*tokenizer.definition_), text_(text) {
    if (valid_utf8_prefix(text) != text.size()) text_ = repaired_ = replace_invalid_utf8(text);
    find_special(0);
    begin_part(0);
  }

  bool encode_block(size_t bytes, std::vector<int32_t>& ids) override {
    std::unique_ptr<bpe::Context> context = tokenizer_.borrow_context();
    const auto encode = [&](std::string_view word) { bpe::encode_word(definition_, word, *context, ids); };
    bool is_done = false;
    for (size_t done = 0; done < bytes && !is_done;) {
      if (!part_.is_done())
        done += definition_.pre_tokenizer.split_on(part_, context->split, encode);
      else
        is_done = !take_added_token(ids);
    }
    std::lock_guard lock(tokenizer_.idle_mutex_);
    tokenizer_.idle_.push_back(std::move(context));
    return is_done;
  }

 private:
  // The text is searched for special tokens, and what lies between them for normalized ones.
  void find_special(size_t begin) {
    special_ = definition_.special_tokens.find(text_, begin, special_begin_);
    if (!special_) special_begin_ = text_.size();
  }
  void begin_part(size_t begin) {
    size_t end = special_begin_;
    normalized_ = definition_.normalized_tokens.find(text_.substr(0, special_begin_), begin, end);
    if (!normalized_) end = special_begin_;
    part_end_ = end;
    definition_.pre_tokenizer.begin(text_.substr(begin, end - begin), part_);
  }

  // Appends the token after the plain part, and begins the next part; false at the end of the text.
  bool take_added_token(std::vector<int32_t>& ids) {
    const AddedToken* token = normalized_ ? normalized_ : special_;
    if (!token) return false;
    ids.push_back(token->id);
    const size_t end = part_end_ + token->content.size();
    if (!normalized_) find_special(end);
    begin_part(end);
    return true;
  }

  const BpeTokenizer& tokenizer_;
  const bpe::Definition& definition_;
  std::string_view text_;  // the caller's, or repaired_
  std::string repaired_;
  // The next added tokens, if there are any; the plain part in progress ends where the first of them begins.
  const AddedToken* special_ = nullptr;
  const AddedToken* normalized_ = nullptr;
  size_t special_begin_ = 0, part_end_ = 0;
  PreTokenizer::Course part_;
};

std::unique_ptr<TextEncoder> BpeTokenizer::open(std::string_view text) const {
  return std::make_unique<Encoder>(*this, text);
}

void BpeTokenizer::encode_into(std::string_view text, std::vector<int32_t>& ids) const {
  // A block of the text's size may be its end without knowing: the next one is empty.
  for (Encoder encoder(*this, text); !encoder.encode_block(text.size() + 1, ids);) {
  }
}

std::string BpeTokenizer::decode(std::span<const int32_t> ids) const {
  std::string bytes;
  for (int32_t id : ids) {
    TITAN_CHECK(id >= 0 && id < vocab_size(), "token id ", id, " is outside the vocabulary of ",
                vocab_size());
    bytes += definition_->bytes_of_id[id];
  }
  return valid_utf8_prefix(bytes) == bytes.size() ? bytes : replace_invalid_utf8(bytes);
}

int64_t BpeTokenizer::vocab_size() const { return static_cast<int64_t>(definition_->bytes_of_id.size()); }
std::optional<int32_t> BpeTokenizer::bos_id() const { return definition_->bos_id; }
std::optional<int32_t> BpeTokenizer::eos_id() const { return definition_->eos_id; }
std::string BpeTokenizer::fingerprint() const { return definition_->fingerprint; }

}  // namespace titan::data
