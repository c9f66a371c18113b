#include "oniguruma.h"

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

// PCRE2's own \s also takes U+180E.
std::string space_members() { return R"(\t-\r\x{85}\p{Z})"; }

// PCRE2's own \w takes (before 10.43) neither marks nor connecting punctuation. The last are Oniguruma's
// superscripts and fractions, which are no letters, but only within Latin-1.
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
