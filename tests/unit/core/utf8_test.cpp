#include <gtest/gtest.h>

#include "core/utf8.h"

namespace titan::data {
namespace {

const std::string kBad = "\xEF\xBF\xBD";

TEST(Utf8, KeepsValidText) {
  std::string text = "plain ascii, é, 字, 😀, \xEF\xBF\xBF, \xF4\x8F\xBF\xBF";
  EXPECT_EQ(valid_utf8_prefix(text), text.size());
  EXPECT_EQ(replace_invalid_utf8(text), text);
  EXPECT_EQ(replace_invalid_utf8(""), "");
}

// The same as Python's bytes.decode("utf-8", errors="replace"): one U+FFFD for each maximal part of an
// ill-formed sequence.
TEST(Utf8, ReplacesDamageAsPythonDoes) {
  EXPECT_EQ(replace_invalid_utf8("a\xFFz"), "a" + kBad + "z");
  EXPECT_EQ(replace_invalid_utf8("\xC0\xAF"), kBad + kBad);                        // overlong
  EXPECT_EQ(replace_invalid_utf8("\xED\xA0\x80"), kBad + kBad + kBad);             // a surrogate
  EXPECT_EQ(replace_invalid_utf8("\xF4\x90\x80\x80"), kBad + kBad + kBad + kBad);  // beyond U+10FFFF
  EXPECT_EQ(replace_invalid_utf8("\xE2\x82"), kBad);                               // cut short
  EXPECT_EQ(replace_invalid_utf8("\xF0\x9F\x98x"), kBad + "x");
  EXPECT_EQ(replace_invalid_utf8("\xF0\x80\x80"), kBad + kBad + kBad);
  EXPECT_EQ(replace_invalid_utf8("\xE2\xE2\x82\xAC"), kBad + "€");
}

TEST(Utf8, PrefixEndsAtTheDamage) {
  EXPECT_EQ(valid_utf8_prefix("0123456789abc\x80"), 13u);
  EXPECT_EQ(valid_utf8_prefix("é\xE2\x82"), 2u);
}

TEST(Utf8, CodePointsRoundTrip) {
  for (char32_t c : {U'a', U'é', U'€', U'\U0001F600', U'\U0010FFFF'}) {
    std::string text;
    append_utf8(c, text);
    size_t position = 0;
    EXPECT_EQ(next_code_point(text, position), c);
    EXPECT_EQ(position, text.size());
  }
}

}  // namespace
}  // namespace titan::data
