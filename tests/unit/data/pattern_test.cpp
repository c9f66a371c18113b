#include "data/tokenizer/pre_tokenizer.h"

#include <gtest/gtest.h>

#include "temporary_folder.h"
#include "titan/core/error.h"

namespace titan::data {
namespace {

std::vector<std::string> matches(const std::string& pattern, std::string_view text) {
  Pattern compiled(pattern, Pattern::Kind::Regex);
  PatternScratch scratch;
  std::vector<std::string> found;
  Match match;
  for (size_t start = 0; compiled.find(text, start, scratch, match); start = match.end)
    found.emplace_back(text.substr(match.begin, match.end - match.begin));
  return found;
}

using Strings = std::vector<std::string>;

TEST(Pattern, MatchesUnicodeClasses) {
  EXPECT_EQ(matches(R"(\p{L}+)", "año 12 字x"), (Strings{"año", "字x"}));
  EXPECT_EQ(matches(R"([^\s\p{L}]+)", "a 12!b"), (Strings{"12!"}));
}

// Where the two dialects differ, the translation must follow Oniguruma.
TEST(Pattern, SpaceIsUnicodeWhiteSpace) {
  EXPECT_EQ(matches(R"(\s+)", "a\u00A0\u2003\u0085b\u180Ec"), (Strings{"\u00A0\u2003\u0085"}));
}

TEST(Pattern, WordsIncludeMarksAndConnectors) {
  EXPECT_EQ(matches(R"(\w+)", "e\u0301_\u203Fx y"), (Strings{"e\u0301_\u203Fx", "y"}));
}

TEST(Pattern, KnowsLettersNewerThanTheInstalledLibrary) {
  EXPECT_EQ(matches(R"(\p{L}+)", "\U00031350\U0002EBF0!"), (Strings{"\U00031350\U0002EBF0"}));
  EXPECT_EQ(matches(R"(\P{L}+)", "\U00031350!"), (Strings{"!"}));
}

TEST(Pattern, MatchesLiteralsAsText) {
  Pattern literal("a.b", Pattern::Kind::Literal);
  PatternScratch scratch;
  Match match;
  ASSERT_TRUE(literal.find("aXb a.b", 0, scratch, match));
  EXPECT_EQ(match.begin, 4u);
}

TEST(Pattern, RefusesSyntaxWithAnotherMeaning) {
  for (const char* pattern : {R"(\h)", R"(\bx)", R"([a[bc]])", R"([a-z&&[^b]])", R"([[:alpha:]])", R"([\S])",
                              R"(\p{Nonsense})", R"(\pL)", R"(\C)", R"(\c\\C)", "\\"})
    EXPECT_THROW(Pattern(pattern, Pattern::Kind::Regex), ConfigError) << pattern;
}

TEST(Pattern, NamesBrokenPatterns) {
  auto message = message_of<ConfigError>([] { Pattern("(a", Pattern::Kind::Regex); });
  EXPECT_NE(message.find("(a"), message.npos) << message;
}

TEST(Pattern, StopsHostilePatterns) {
  Pattern pattern("(x+x+)+[yz]", Pattern::Kind::Regex);
  PatternScratch scratch;
  Match match;
  std::string text(200, 'x');
  EXPECT_THROW(pattern.find(text, 0, scratch, match), Error);
}

}  // namespace
}  // namespace titan::data
