#include "pre_tokenizer_json.h"

namespace titan::data::bpe {
namespace {

using Json = nlohmann::json;
using Stages = std::vector<SplitStage>;

constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

SplitStage read_byte_level(const JsonFile& file, const Json& part) {
  SplitStage stage;
  stage.add_prefix_space = file.get(part, "add_prefix_space", true);
  if (file.get(part, "use_regex", true)) stage.pattern.emplace(kGpt2Pattern, Pattern::Kind::Regex);
  return stage;
}

SplitStage read_digits(const JsonFile& file, const Json& part) {
  SplitStage stage;
  stage.pattern.emplace(R"(\p{N})", Pattern::Kind::Regex);
  if (!file.get(part, "individual_digits", false)) stage.behavior = SplitBehavior::Contiguous;
  return stage;
}

SplitBehavior behavior_named(const JsonFile& file, const std::string& name) {
  if (name == "Isolated") return SplitBehavior::Isolated;
  if (name == "Removed") return SplitBehavior::Removed;
  if (name == "MergedWithPrevious") return SplitBehavior::MergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::MergedWithNext;
  if (name == "Contiguous") return SplitBehavior::Contiguous;
  file.refuse(str("Split has the unknown behavior '", name, "'"));
}

Pattern read_pattern(const JsonFile& file, const Json& pattern) {
  bool literal = JsonFile::find(pattern, "String");
  auto text = file.get<std::string>(pattern, literal ? "String" : "Regex", "");
  if (text.empty()) file.refuse("Split has no pattern");
  try {
    return Pattern(text, literal ? Pattern::Kind::Literal : Pattern::Kind::Regex);
  } catch (const ConfigError& error) {  // the pattern doesn't know its file
    file.refuse(error.what());
  }
}

SplitStage read_split(const JsonFile& file, const Json& part) {
  SplitStage stage;
  stage.pattern = read_pattern(file, file.need(part, "pattern"));
  stage.behavior = behavior_named(file, file.get<std::string>(part, "behavior", ""));
  stage.invert = file.get(part, "invert", false);
  return stage;
}

void add_stages(const JsonFile& file, const Json& part, Stages& stages) {
  std::string type = file.type_of(part);
  if (type == "Sequence") {
    for (const Json& inner : file.need(part, "pretokenizers")) add_stages(file, inner, stages);
  } else if (type == "ByteLevel") {
    stages.push_back(read_byte_level(file, part));
  } else if (type == "Digits") {
    stages.push_back(read_digits(file, part));
  } else if (type == "Split") {
    stages.push_back(read_split(file, part));
  } else {
    file.refuse(
        str("pre_tokenizer '", type, "' is not supported; supported: ByteLevel, Split, Digits, Sequence"));
  }
}

}  // namespace

PreTokenizer read_pre_tokenizer(const JsonFile& file) {
  Stages stages;
  if (const Json* part = JsonFile::find(file.tree(), "pre_tokenizer")) add_stages(file, *part, stages);
  return PreTokenizer(std::move(stages));
}

}  // namespace titan::data::bpe
