#include "tokenizer_json.h"

#include <nlohmann/json.hpp>

#include "byte_alphabet.h"
#include "hash.h"
#include "titan/core/error.h"
#include "titan/core/file.h"
#include "utf8.h"

namespace titan::data::bpe {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

Json parse_json(const fs::path& path, const std::string& text) {
  Json tree = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!tree.is_object()) throw ConfigError(str(path.string(), " is not a JSON object"));
  return tree;
}

// One reading of one file: the tree, the path for messages, and what is being filled.
class Reader {
 public:
  Reader(const fs::path& path, const std::string& text, Definition& out)
      : path_(path), tree_(parse_json(path, text)), out_(out) {}

  void read() {
    check_model();
    check_normalizer();
    check_decoder();
    read_vocabulary();
    read_merges();
    read_added_tokens();
    std::vector<SplitStage> stages;
    if (const Json* part = present(tree_, "pre_tokenizer")) read_stages(*part, stages);
    out_.pre_tokenizer = PreTokenizer(std::move(stages));
    fill_decoding();
    read_template();
    read_config();
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw ConfigError(str(path_.string(), ": ", what));
  }

  // The member when it is there and not null.
  static const Json* present(const Json& object, const char* key) {
    auto found = object.find(key);
    return found == object.end() || found->is_null() ? nullptr : &*found;
  }

  template <class T>
  T get(const Json& object, const char* key, T otherwise) const {
    const Json* value = present(object, key);
    if (!value) return otherwise;
    try {
      return value->get<T>();
    } catch (const Json::exception&) {
      refuse(str("'", key, "' has the wrong type: ", value->dump().substr(0, 80)));
    }
  }

  const Json& need(const Json& object, const char* key) const {
    const Json* value = object.is_object() ? present(object, key) : nullptr;
    if (!value) refuse(str("'", key, "' is missing"));
    return *value;
  }

  static std::string type_of(const Json& part) { return part.is_object() ? part.value("type", "?") : "?"; }

  void check_model() const {
    const Json& model = need(tree_, "model");
    std::string type = get<std::string>(model, "type", "BPE");
    if (type != "BPE") refuse(str("model type '", type, "' is not supported; supported: BPE (byte-level)"));
    if (get(model, "byte_fallback", false)) refuse("byte_fallback is not supported: it isn't byte-level BPE");
    if (get(model, "dropout", 0.0) != 0) refuse("dropout would make data random; remove it from the model");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (!get<std::string>(model, key, "").empty()) refuse(str(key, " is not supported"));
  }

  void check_normalizer() const {
    const Json* part = present(tree_, "normalizer");
    if (!part || (type_of(*part) == "Sequence" && need(*part, "normalizers").empty())) return;
    refuse(str("normalizer '", type_of(*part), "' is not supported; supported: none"));
  }

  void check_decoder() const {
    const Json* part = present(tree_, "decoder");
    while (part && type_of(*part) == "Sequence" && need(*part, "decoders").size() == 1)
      part = &need(*part, "decoders")[0];
    if (!part || type_of(*part) != "ByteLevel")
      refuse(str("decoder '", part ? type_of(*part) : "none", "' is not supported; supported: ByteLevel"));
  }

  void read_vocabulary() {
    const Json& vocabulary = need(need(tree_, "model"), "vocab");
    if (!vocabulary.is_object()) refuse("model.vocab is not an object of tokens and ids");
    for (const auto& [token, id] : vocabulary.items()) name_id(token, id);
    read_byte_ids();
    if (!get(need(tree_, "model"), "ignore_merges", false)) return;
    for (const auto& [token, id] : ids_)
      if (auto bytes = bytes_from_alphabet(token)) out_.whole_words.emplace(*bytes, id);
  }

  void name_id(const std::string& token, const Json& id) {
    constexpr int64_t kLargest =
        1 << 28;  // far above any vocabulary; bounds what a broken file makes us allocate
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() > kLargest)
      refuse(str("token '", token, "' has the id ", id.dump()));
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
        refuse(str("the vocabulary has no token for byte ", byte, ": it isn't byte-level BPE"));
    }
  }

  int32_t id_of(const std::string& token, const char* where) const {
    auto found = ids_.find(token);
    if (found == ids_.end()) refuse(str(where, " names '", token, "', which is not in the vocabulary"));
    return found->second;
  }

  void read_merges() {
    const Json& merges = need(need(tree_, "model"), "merges");
    if (!merges.is_array()) refuse("model.merges is not a list");
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
    refuse(str("a merge is neither a pair nor two words: ", merge.dump().substr(0, 80)));
  }

  void read_added_tokens() {
    std::vector<AddedToken> special, normalized;
    const Json* tokens = present(tree_, "added_tokens");
    for (const Json& token : tokens ? *tokens : Json::array()) {
      auto content = get<std::string>(token, "content", "");
      if (content.empty()) refuse("an added token without content");
      for (const char* key : {"single_word", "lstrip", "rstrip"})
        if (get(token, key, false))
          refuse(str("added token '", content, "' has ", key, ", which is not supported"));
      name_id(content, need(token, "id"));
      (get(token, "normalized", !get(token, "special", false)) ? normalized : special)
          .push_back({content, ids_[content]});
    }
    out_.special_tokens = AddedTokens(std::move(special));
    out_.normalized_tokens = AddedTokens(std::move(normalized));
  }

  void read_stages(const Json& part, std::vector<SplitStage>& stages) const {
    std::string type = type_of(part);
    if (type == "Sequence") {
      for (const Json& inner : need(part, "pretokenizers")) read_stages(inner, stages);
    } else if (type == "ByteLevel") {
      SplitStage stage;
      stage.add_prefix_space = get(part, "add_prefix_space", true);
      if (get(part, "use_regex", true)) stage.pattern.emplace(kGpt2Pattern, Pattern::Kind::Regex);
      stages.push_back(std::move(stage));
    } else if (type == "Digits") {
      bool individual = get(part, "individual_digits", false);
      stages.push_back({.pattern = Pattern(R"(\p{N})", Pattern::Kind::Regex),
                        .behavior = individual ? SplitBehavior::Isolated : SplitBehavior::Contiguous});
    } else if (type == "Split") {
      stages.push_back({.pattern = read_pattern(need(part, "pattern")),
                        .behavior = behavior_named(get<std::string>(part, "behavior", "")),
                        .invert = get(part, "invert", false)});
    } else {
      refuse(
          str("pre_tokenizer '", type, "' is not supported; supported: ByteLevel, Split, Digits, Sequence"));
    }
  }

  Pattern read_pattern(const Json& pattern) const {
    try {
      if (pattern.is_object() && pattern.contains("String"))
        return Pattern(get<std::string>(pattern, "String", ""), Pattern::Kind::Literal);
      return Pattern(need(pattern, "Regex").get<std::string>(), Pattern::Kind::Regex);
    } catch (const ConfigError& error) {  // the pattern doesn't know its file
      refuse(error.what());
    }
  }

  SplitBehavior behavior_named(const std::string& name) const {
    if (name == "Isolated") return SplitBehavior::Isolated;
    if (name == "Removed") return SplitBehavior::Removed;
    if (name == "MergedWithPrevious") return SplitBehavior::MergedWithPrevious;
    if (name == "MergedWithNext") return SplitBehavior::MergedWithNext;
    if (name == "Contiguous") return SplitBehavior::Contiguous;
    refuse(str("Split has the unknown behavior '", name, "'"));
  }

  void fill_decoding() {
    for (const auto& [token, id] : ids_) {
      if (static_cast<size_t>(id) >= out_.bytes_of_id.size()) out_.bytes_of_id.resize(id + 1);
      out_.bytes_of_id[id] = bytes_from_alphabet(token).value_or(token);
    }
  }

  // TemplateProcessing of `single`: special tokens before the sequence are BOS, after it EOS.
  void read_template() {
    const Json* part = present(tree_, "post_processor");
    if (!part) return;
    const Json* list = type_of(*part) == "Sequence" ? &need(*part, "processors") : nullptr;
    for (const Json& processor : list ? *list : Json::array({*part}))
      if (type_of(processor) == "TemplateProcessing") read_single(need(processor, "single"));
  }

  void read_single(const Json& single) {
    bool after = false;
    for (const Json& item : single) {
      if (item.contains("Sequence")) after = true;
      if (!item.contains("SpecialToken")) continue;
      int32_t id = id_of(get<std::string>(item["SpecialToken"], "id", ""), "post_processor");
      (after ? out_.eos_id : out_.bos_id) = id;
    }
  }

  void read_config() {
    fs::path path = path_.parent_path() / "tokenizer_config.json";
    if (!fs::exists(path)) return;
    Json config = parse_json(path, read_file(path));
    for (auto [key, id] : {std::pair{"bos_token", &out_.bos_id}, {"eos_token", &out_.eos_id}}) {
      const Json* token = present(config, key);
      if (!token) continue;
      auto content =
          token->is_object() ? get<std::string>(*token, "content", "") : get<std::string>(config, key, "");
      *id = id_of(content, "tokenizer_config.json");
    }
  }

  const fs::path& path_;
  const Json tree_;
  Definition& out_;
  std::unordered_map<std::string, int32_t> ids_;
};

}  // namespace

std::unique_ptr<const Definition> read_definition(const fs::path& path) {
  if (!fs::exists(path)) throw ConfigError(str("no tokenizer at ", path.string()));
  auto definition = std::make_unique<Definition>();
  std::string text = read_file(path);
  Reader(path, text, *definition).read();
  auto shown = [](std::optional<int32_t> id) { return id ? std::to_string(*id) : "none"; };
  definition->fingerprint =
      str("bpe:", definition->bytes_of_id.size(), " tokens:bos ", shown(definition->bos_id), ":eos ",
          shown(definition->eos_id), ":", hex(hash_bytes(text)));
  return definition;
}

}  // namespace titan::data::bpe
