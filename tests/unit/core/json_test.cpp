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

TEST(ShallowJson, RefusesDuplicateKeysAndSaysWhere) {
  std::string problem;
  EXPECT_TRUE(parse_json(R"({"a":1,"a":2})", &problem).is_discarded());
  EXPECT_EQ(problem, "duplicate key 'a'");
  EXPECT_TRUE(parse_json(R"([{"a":{"b":1,"c":[],"b":{}}}])").is_discarded());
  EXPECT_TRUE(parse_json<nlohmann::ordered_json>(R"({"a":1,"b":2,"a":2})").is_discarded());
  EXPECT_TRUE(parse_json(std::string("[1\0]", 4), &problem).is_discarded());
  EXPECT_EQ(problem, "not JSON at byte 3: a NUL byte");
  EXPECT_TRUE(parse_json("[1,]", &problem).is_discarded());
  EXPECT_TRUE(problem.starts_with("not JSON at byte 4: ")) << problem;
}

TEST(ShallowJson, KeepsKindsOfNumbersAndTheOrderOfKeys) {
  const json tree = parse_json("[-5,5,9223372036854775808,0.5]");
  EXPECT_TRUE(tree[0].is_number_integer() && !tree[0].is_number_unsigned());
  EXPECT_TRUE(tree[1].is_number_unsigned());
  EXPECT_EQ(tree[2].get<uint64_t>(), uint64_t{1} << 63);
  EXPECT_TRUE(tree[3].is_number_float());
  const std::string text = R"({"z":[{"y":1,"x":[2,{"w":3}]}],"a":"b"})";
  EXPECT_EQ(parse_json<nlohmann::ordered_json>(text).dump(), text);
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
