#include "data/tokenizer/pre_tokenizer.h"

#include <algorithm>

#include "core/utf8.h"

namespace titan::data {
namespace {

using Segment = PreTokenizer::Scratch::Segment;

// Joins neighbours for which `joins(previous is a match, this is a match)`.
template <class Joins>
void join(std::vector<Segment>& segments, const Joins& joins) {
  size_t kept = 0;
  bool previous_matched = false;
  for (const Segment segment : segments) {
    if (kept > 0 && joins(previous_matched, segment.matched)) {
      segments[kept - 1].begin = std::min(segments[kept - 1].begin, segment.begin);
      segments[kept - 1].end = std::max(segments[kept - 1].end, segment.end);
    } else {
      segments[kept++] = segment;
    }
    previous_matched = segment.matched;
  }
  segments.resize(kept);
}

// A match joins the segment before it, unless that is a match too.
constexpr auto kMatchJoins = [](bool previous, bool current) { return current && !previous; };
constexpr auto kAlikeJoin = [](bool previous, bool current) { return current == previous; };

}  // namespace

size_t PreTokenizer::after(std::string_view text, Match match) {
  if (match.end > match.begin) return match.end;
  size_t next = match.end + 1;
  while (next < text.size() && !starts_character(text[next])) ++next;
  return next;
}

void PreTokenizer::cut(const SplitStage& stage, std::string_view text, PatternScratch& scratch,
                       std::vector<Segment>& segments) {
  segments.clear();
  size_t done = 0;
  Match match;
  for (size_t start = 0; start < text.size() && stage.pattern->find(text, start, scratch, match);
       start = after(text, match)) {
    if (done < match.begin) segments.push_back({done, match.begin, stage.invert});
    segments.push_back({match.begin, match.end, !stage.invert});
    done = match.end;
  }
  if (done < text.size()) segments.push_back({done, text.size(), stage.invert});
  switch (stage.behavior) {
    case SplitBehavior::Isolated:
      return;
    case SplitBehavior::Removed:
      std::erase_if(segments, [](const Segment& s) { return s.matched; });
      return;
    case SplitBehavior::MergedWithPrevious:
      return join(segments, kMatchJoins);
    case SplitBehavior::MergedWithNext:
      std::reverse(segments.begin(), segments.end());
      join(segments, kMatchJoins);
      std::reverse(segments.begin(), segments.end());
      return;
    case SplitBehavior::Contiguous:
      return join(segments, kAlikeJoin);
  }
}

}  // namespace titan::data

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
  } catch (const ConfigError& error) {  // adds the file to the message
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
