#include "titan/core/registry.h"

#include <gtest/gtest.h>

namespace titan {
namespace {

TEST(Registry, FindsWhatWasAdded) {
  Registry<int> registry("model");
  registry.add("llama3", 3);
  EXPECT_TRUE(registry.contains("llama3"));
  EXPECT_FALSE(registry.contains("llama4"));
  EXPECT_EQ(registry.get("llama3"), 3);
  EXPECT_EQ(registry.names(), std::vector<std::string>{"llama3"});
}

TEST(Registry, RefusesATakenName) {
  Registry<int> registry("model");
  registry.add("llama3", 3);
  EXPECT_THROW(registry.add("llama3", 4), Error);
  EXPECT_EQ(registry.get("llama3"), 3);
}

TEST(Registry, UnknownNameErrorListsKnownAndNearestNames) {
  Registry<int> registry("data source");
  registry.add("text", 1);
  registry.add("tokens", 2);
  try {
    registry.get("txt");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "unknown data source 'txt'; known: text, tokens; did you mean 'text'?");
  }
}

TEST(Registry, ReferencesStayValid) {
  Registry<std::string> registry("plan");
  registry.add("m", "value");
  const std::string& first = registry.get("m");
  for (int i = 0; i < 100; ++i) registry.add(std::to_string(i), "other");
  EXPECT_EQ(first, "value");
}

}  // namespace
}  // namespace titan
