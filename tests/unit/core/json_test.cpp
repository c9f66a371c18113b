#include <gtest/gtest.h>
#include <string>

#include "core/json.h"

namespace titan {
namespace {

using nlohmann::json;

std::string nested(int depth) { return std::string(depth, '[') + std::string(depth, ']'); }

TEST(ShallowJson, LimitsTreesTo64Levels) {
  EXPECT_EQ(parse_json(R"({"a":[1,"b",null]})"), json({{"a", {1, "b", nullptr}}}));
  EXPECT_EQ(parse_json("7"), json(7));
  EXPECT_EQ(parse_json(nested(64)).dump(), nested(64));
  for (const std::string& text :
       {nested(65), nested(1'000'000), std::string(1'000'000, '['), "{\"a\":1,\"b\":" + nested(64) + "}",
        std::string(), std::string("{"), std::string("[1]]")})
    EXPECT_TRUE(parse_json(text).is_discarded()) << text.substr(0, 80);
}

TEST(ShallowJson, CountsAreWholeNumbersThatCanBeAdded) {
  const json tree = parse_json(R"({"zero":0,"most":2305843009213693951,"more":2305843009213693952,
      "negative":-1,"huge":18446744073709551616,"real":1.0,"text":"1"})");
  EXPECT_EQ(json_count(tree, "zero"), 0);
  EXPECT_EQ(json_count(tree, "most"), kMaxJsonCount);
  for (const char* key : {"more", "negative", "huge", "real", "text", "none"})
    EXPECT_EQ(json_count(tree, key), std::nullopt) << key;
  EXPECT_EQ(json_count(json(3), "zero"), std::nullopt);
  EXPECT_EQ(json_count(parse_json("?"), "zero"), std::nullopt);
  EXPECT_EQ(json_count(parse_json("5")), 5);
}

}  // namespace
}  // namespace titan
