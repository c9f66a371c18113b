#include "titan/core/error.h"

#include <algorithm>

#include <gtest/gtest.h>

namespace titan {
namespace {

using Names = std::vector<std::string>;

TEST(Error, StrConcatenatesWhateverPrints) { EXPECT_EQ(str("got ", 3, " of ", 2.5, '!'), "got 3 of 2.5!"); }

TEST(Error, ConfigErrorHoldsEveryProblem) {
  ConfigError error(Names{"one", "two"});
  EXPECT_STREQ(error.what(), "one\ntwo");
  EXPECT_EQ(error.problems(), (Names{"one", "two"}));
}

TEST(Error, ConfigErrorIsReadableWhateverItsInput) {
  const ConfigError error(Names(20'000, std::string(5000, 'x').replace(3999, 2, "\u00e9")));
  EXPECT_EQ(error.problems().size(), 20'000u);
  const std::string text = error.what();
  EXPECT_EQ(text.substr(0, 4003), std::string(3999, 'x') + "...\n") << "the last character isn't cut in two";
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2000);
  EXPECT_TRUE(text.ends_with("\nand 18000 more lines"));
  EXPECT_STREQ(ConfigError(Names(2000, "x\ny")).what() + 3999, "\nand 2000 more lines");
  EXPECT_STREQ(ConfigError("").what(), "");
}

TEST(Error, CheckNamesThePlace) {
  try {
    TITAN_CHECK(1 + 1 == 3, "expected ", 3, ", got ", 2);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).rfind("expected 3, got 2 [tests/unit/core/error_test.cpp:", 0), 0u)
        << error.what();
  }
}

TEST(Error, InternalAssertReportsABugWithABacktrace) {
  try {
    TITAN_INTERNAL_ASSERT(2 < 1, "order of ", "shards");
    FAIL();
  } catch (const InternalError& error) {
    std::string text = error.what();
    EXPECT_EQ(text.rfind("a bug in LibTitan: '2 < 1' does not hold: order of shards [", 0), 0u) << text;
    EXPECT_NE(text.find("\n    "), std::string::npos) << text;
  }
}

TEST(Error, AssertNeedsNoMessage) { EXPECT_THROW(TITAN_INTERNAL_ASSERT(false), InternalError); }

TEST(Error, ReasonsHaveNoStackOfLibTorch) {
  EXPECT_EQ(reason_of(std::runtime_error("full\nException raised from f at a.cpp:1")), "full");
  EXPECT_EQ(reason_of(std::runtime_error("full\nof text\nframe #0: f + 0x1 (0x2 in a.so)\nframe #1: ")),
            "full\nof text");
  EXPECT_EQ(reason_of(InternalError("bug\nframe #0: f")), "bug\nframe #0: f");
}

TEST(NearestNames, FindsTyposSwapsAndCase) {
  Names known{"seq_len", "steps", "dataset", "AdamW", "Adam"};
  EXPECT_EQ(nearest_names("seq_lne", known), Names{"seq_len"});
  EXPECT_EQ(nearest_names("seq-len", known), Names{"seq_len"});
  EXPECT_EQ(nearest_names("adamw", known), (Names{"AdamW", "Adam"}));
  EXPECT_EQ(nearest_names("datset", known), Names{"dataset"});
}

TEST(NearestNames, FindsPartsOfNames) {
  EXPECT_EQ(nearest_names("batch_size", {"local_batch_size", "lr"}), Names{"local_batch_size"});
}

TEST(NearestNames, FindsAbbreviations) {
  EXPECT_EQ(nearest_names("learning_rate", {"lr", "steps"}), Names{"lr"});
}

TEST(NearestNames, ReturnsNothingIfNoneIsNear) {
  EXPECT_TRUE(nearest_names("flavor_of_the_day", {"lr", "steps"}).empty());
  EXPECT_TRUE(nearest_names("lr", {}).empty());
  EXPECT_TRUE(nearest_names(std::string(10'000'000, 's'), {"steps"}).empty()) << "and at once";
}

TEST(NearestNames, LimitDropsTheFarthest) {
  EXPECT_EQ(nearest_names("abc", {"abd", "abc", "abe"}, 2), (Names{"abc", "abd"}));
}

}  // namespace
}  // namespace titan
