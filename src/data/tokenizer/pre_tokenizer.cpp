#include "data/tokenizer/pre_tokenizer.h"

#include <algorithm>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "core/utf8.h"

namespace titan::data {
namespace {

struct Property {
  std::string_view name;
  std::string_view in_pcre2;
  std::string_view additions;
};

constexpr Property kProperties[] = {
#include "unicode_additions.inc"
};

const Property* find_property(std::string_view name) {
  for (const Property& property : kProperties)
    if (property.name == name) return &property;
  return nullptr;
}

std::string members_of(const Property& property) {
  return str("\\p{", property.in_pcre2, "}", property.additions);
}

// PCRE2's own \s includes U+180E.
std::string space_members() { return R"(\t-\r\x{85}\p{Z})"; }

// PCRE2's own \w excludes (before 10.43) marks and connecting punctuation. The last ones are Latin-1's
// superscripts and fractions, which Oniguruma includes.
std::string word_members() {
  std::string members = R"(\p{Alphabetic}\p{M}\p{Pc}\xB2\xB3\xB9\xBC-\xBE)";
  for (const char* name : {"L", "M", "Nd"}) members += find_property(name)->additions;
  return members + R"(\p{Nd})";
}

// Translates a pattern from Oniguruma's dialect, which the `tokenizers` package uses, to PCRE2's. Rewrites
// everything that the two read differently (`\s`, `\w`, properties by their Unicode version). Throws
// ConfigError, with the pattern, the position and the reason, for a pattern that PCRE2 can't express.
class Translator {
 public:
  explicit Translator(const std::string& pattern) : in_(pattern) {}

  std::string run() {
    while (at_ < in_.size()) {
      if (in_[at_] == '\\')
        escape();
      else if (in_class_)
        class_member();
      else if (in_[at_] == '[')
        open_class();
      else
        out_ += in_[at_++];
    }
    return std::move(out_);
  }

 private:
  void open_class() {
    in_class_ = true;
    out_ += in_[at_++];
    if (at_ < in_.size() && in_[at_] == '^') out_ += in_[at_++];
  }

  void class_member() {
    if (in_.compare(at_, 2, "[:") == 0) refuse("a POSIX class");
    if (in_[at_] == '[') refuse("a set within a set (escape the bracket if it stands for itself)");
    if (in_.compare(at_, 2, "&&") == 0) refuse("an intersection of sets");
    if (in_[at_] == ']') in_class_ = false;
    out_ += in_[at_++];
  }

  void escape() {
    if (at_ + 1 >= in_.size()) refuse("a backslash at its end");
    char c = in_[at_ + 1];
    if (c == 'p' || c == 'P') return property(c == 'P');
    if (c == 's' || c == 'S')
      put_set(space_members(), c == 'S');
    else if (c == 'w' || c == 'W')
      put_set(word_members(), c == 'W');
    else if (c == 'd' || c == 'D')
      put_set(members_of(*find_property("Nd")), c == 'D');
    else if (c == 'h' || c == 'H')
      refuse("\\h (a hexadecimal digit in Oniguruma, a space in PCRE2)");
    else if ((c == 'b' || c == 'B') && !in_class_)
      refuse("a word boundary");
    else
      out_.append(in_, at_, 2);
    at_ += 2;
  }

  void property(bool negated) {
    size_t end = in_.find('}', at_);
    if (in_.compare(at_ + 2, 1, "{") != 0 || end == in_.npos) refuse("a property without braces");
    std::string name = in_.substr(at_ + 3, end - at_ - 3);
    if (!name.empty() && name[0] == '^') {
      negated = !negated;
      name.erase(0, 1);
    }
    const Property* property = find_property(name);
    if (!property) refuse(str("the property '", name, "'"));
    put_set(members_of(*property), negated);
    at_ = end + 1;
  }

  void put_set(const std::string& members, bool negated) {
    if (in_class_ && negated) refuse("a negated class within a set");
    if (in_class_)
      out_ += members;
    else
      out_ += str(negated ? "[^" : "[", members, "]");
  }

  [[noreturn]] void refuse(const std::string& what) const {
    throw ConfigError(
        str("pattern '", in_, "' has ", what, " at position ", at_, ", which is not supported"));
  }

  const std::string& in_;
  std::string out_;
  size_t at_ = 0;
  bool in_class_ = false;
};

// A word of ordinary text takes tens of steps. This limits a hostile one to about a tenth of a second.
constexpr uint32_t kMatchLimit = 10'000'000;
constexpr size_t kFirstStackBytes = 32 << 10;
constexpr size_t kLargestStackBytes = 8 << 20;

std::string error_text(int code) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(code, buffer, sizeof buffer);
  return reinterpret_cast<const char*>(buffer);
}

using Segment = PreTokenizer::Scratch::Segment;

// Joins neighbors for which joins(previous.matched, current.matched) is true.
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

PatternScratch::PatternScratch()
    : match_(pcre2_match_data_create(1, nullptr)),
      limits_(pcre2_match_context_create(nullptr)),
      stack_(pcre2_jit_stack_create(kFirstStackBytes, kLargestStackBytes, nullptr)) {
  TITAN_CHECK(match_ && limits_ && stack_, "no memory for a regular expression's stack");
  pcre2_set_match_limit(limits_, kMatchLimit);
  pcre2_jit_stack_assign(limits_, nullptr, stack_);
}

PatternScratch::~PatternScratch() {
  pcre2_match_data_free(match_);
  pcre2_match_context_free(limits_);
  pcre2_jit_stack_free(stack_);
}

Pattern::Pattern(const std::string& pattern, Kind kind) : pattern_(pattern) {
  bool literal = kind == Kind::Literal;
  std::string source = literal ? pattern : Translator(pattern).run();
  // In Oniguruma, ^ and $ always match at line breaks. \C would split characters, and matching the rest would
  // read out of bounds.
  uint32_t options =
      PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C);
  int code = 0;
  size_t offset = 0;
  auto* text = reinterpret_cast<PCRE2_SPTR>(source.data());
  code_.reset(pcre2_compile(text, source.size(), options, &code, &offset, nullptr),
              [](pcre2_real_code_8* compiled) { pcre2_code_free(compiled); });
  if (!code_)
    throw ConfigError(
        str("pattern '", pattern, "': ", error_text(code), " (near '", source.substr(offset), "')"));
  // Without a just-in-time compiler on this platform, the slower interpreter runs.
  jit_ = pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE) == 0;
}

bool Pattern::find(std::string_view text, size_t start, PatternScratch& scratch, Match& match) const {
  auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  auto matcher = jit_ ? pcre2_jit_match : pcre2_match;
  int code =
      matcher(code_.get(), subject, text.size(), start, PCRE2_NO_UTF_CHECK, scratch.match_, scratch.limits_);
  if (code == PCRE2_ERROR_NOMATCH) return false;
  if (code < 0)
    throw Error(str("splitting text with pattern '", pattern_, "' failed at byte ", start, " of ",
                    text.size(), ": ", error_text(code)));
  const size_t* ends = pcre2_get_ovector_pointer(scratch.match_);
  match = {ends[0], ends[1]};
  return true;
}

// ---- splitting

void PreTokenizer::begin(std::string_view text, Course& course) const {
  course.stage_ = course.done_ = course.start_ = course.next_ = 0;
  course.is_cut_ = false;
  course.text_ = text;
  for (; course.stage_ < stages_.size() && !text.empty(); ++course.stage_) {
    const SplitStage& stage = stages_[course.stage_];
    if (stage.add_prefix_space && course.text_[0] != ' ') {
      course.prefixed_.assign(1, ' ').append(text);
      course.text_ = course.prefixed_;
    }
    if (stage.pattern) break;
  }
}

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
