#include "data/tokenizer/pattern.h"

#include <string_view>

#include "titan/core/error.h"

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

// PCRE2's own \w excludes (before 10.43) marks and connecting punctuation. The last ones are Oniguruma's
// superscripts and fractions of Latin-1.
std::string word_members() {
  std::string members = R"(\p{Alphabetic}\p{M}\p{Pc}\xB2\xB3\xB9\xBC-\xBE)";
  for (const char* name : {"L", "M", "Nd"}) members += find_property(name)->additions;
  return members + R"(\p{Nd})";
}

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
      refuse("\\h, which is a hexadecimal digit there and a space here");
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

}  // namespace

std::string translate_oniguruma(const std::string& pattern) { return Translator(pattern).run(); }

}  // namespace titan::data

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "titan/core/error.h"

namespace titan::data {
namespace {

// A word of ordinary text takes tens of steps. This limits a hostile one to about a tenth of a second.
constexpr uint32_t kMatchLimit = 10'000'000;
constexpr size_t kFirstStackBytes = 32 << 10;
constexpr size_t kLargestStackBytes = 8 << 20;

std::string error_text(int code) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(code, buffer, sizeof buffer);
  return reinterpret_cast<const char*>(buffer);
}

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
  std::string source = literal ? pattern : translate_oniguruma(pattern);
  // In Oniguruma, ^ and $ always match at lines. \C would split characters, and matching the rest would read
  // out of bounds.
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
  if (code < 0) fail(code, text, start);
  const size_t* ends = pcre2_get_ovector_pointer(scratch.match_);
  match = {ends[0], ends[1]};
  return true;
}

void Pattern::fail(int code, std::string_view text, size_t start) const {
  throw Error(str("splitting text with pattern '", pattern_, "' failed at byte ", start, " of ", text.size(),
                  ": ", error_text(code)));
}

}  // namespace titan::data
