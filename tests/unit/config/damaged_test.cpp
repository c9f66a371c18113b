// Damaged files: for any bytes, the result is a document or a ConfigError with a place.

#include <gtest/gtest.h>

#include <random>

#include "config/document.h"
#include "titan/core/error.h"

namespace titan::config {
namespace {

constexpr std::string_view kToml =
    "include = [\"a.toml\"]\n[a.b]\nc = 1.5e3 # note\n\"d.e\" = '''x\ny'''\nf = [[1, 2], [\"\\u00e9\"]]\n"
    "g = {h = true, i.j = 0x1f}\n[[k]]\nl = 1979-05-27T07:32:00Z\n";
constexpr std::string_view kJson =
    "{\"include\": [\"a.json\"], \"a\": {\"b\": {\"c\": 1.5e3, \"d.e\": \"x\\u00e9\\ud83d\\ude42\"}},\n"
    " \"f\": [[1, -2], [null, {\"q\": [{}]}]], \"g\": {\"h\": true}, \"k\": 12345678901234567890}";

std::string damaged(std::string text, std::mt19937& random) {
  constexpr std::string_view kNasty = "{}[]\"'=.,:#\\\n\r\t-+eE0\xff\xc3\x80";
  for (size_t i = 0, changes = 1 + random() % 4; i < changes && !text.empty(); ++i) {
    size_t at = random() % text.size();
    switch (random() % 4) {
      case 0:
        text[at] = kNasty[random() % kNasty.size()];
        break;
      case 1:
        text.insert(at, 1 + random() % 3, kNasty[random() % kNasty.size()]);
        break;
      case 2:
        text.erase(at, 1 + random() % 5);
        break;
      default:
        text.insert(at, text.substr(random() % text.size(), random() % 20));
    }
  }
  return text;
}

template <class Read>
void try_many(std::string_view original, Read read) {
  std::mt19937 random(7);
  size_t refused = 0;
  for (int i = 0; i < 10000; ++i) {
    std::string text = damaged(std::string(original), random);
    try {
      read(text, "f");
    } catch (const ConfigError& error) {
      ++refused;
      EXPECT_EQ(std::string(error.what()).rfind("f:", 0), 0u) << error.what();
    }
  }
  EXPECT_GT(refused, 1000u);
  EXPECT_LT(refused, 10000u);
}

TEST(Damaged, Toml) { try_many(kToml, read_toml); }
TEST(Damaged, Json) { try_many(kJson, read_json); }

// Every character after a number, including those that toml++ assumes to be impossible.
TEST(Damaged, AnyCharacterAfterANumber) {
  for (const char* letter : {"\u00a1", "\u015a", "\u0416", "\u1681", "\u2030", "\ufefe", "\U00010400"})
    EXPECT_THROW(read_toml(std::string("x = 1.") + letter + "3", "f"), ConfigError) << letter;
}

TEST(Damaged, RefusesTextAfterAZeroByte) {
  EXPECT_THROW(read_json(std::string_view("{}\n\0{", 5), "f"), ConfigError);
  EXPECT_THROW(read_toml(std::string_view("a = 1\n\0b", 8), "f"), ConfigError);
}

}  // namespace
}  // namespace titan::config
