#include "titan/data/tokenizer.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "core/utf8.h"
#include "data/feed/feeds.h"
#include "data/tokenizer/bpe_tokenizer.h"
#include "fake_source.h"
#include "temporary_folder.h"
#include "titan/core/error.h"

namespace titan::data {
namespace {

using Json = nlohmann::json;
using Ids = std::vector<int32_t>;

// All bytes, two merges, two added tokens: the least that counts as byte-level BPE. The id of a byte is its
// value.
Json small_tokenizer() {
  Json vocabulary;
  for (int byte = 0; byte < 256; ++byte) {
    std::string token;
    append_utf8(byte_alphabet()[byte], token);
    vocabulary[token] = byte;
  }
  vocabulary["ab"] = 256;
  vocabulary["abc"] = 257;
  vocabulary["bc"] = 258;
  Json tree = Json::parse(R"({
    "model": {"type": "BPE", "merges": [["b", "c"], ["a", "b"], ["a", "bc"]]},
    "added_tokens": [{"id": 300, "content": "<s>", "special": true, "normalized": false},
                     {"id": 301, "content": "<s>>", "special": true, "normalized": false}],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
    "decoder": {"type": "ByteLevel"}})");
  tree["model"]["vocab"] = vocabulary;
  return tree;
}

class BpeTest : public testing::Test {
 protected:
  BpeTokenizer build(const Json& tree) { return BpeTokenizer(folder_.write("tokenizer.json", tree.dump())); }
  std::string refusal(const Json& tree) {
    return message_of<ConfigError>([&] { build(tree); });
  }
  TemporaryFolder folder_;
};

TEST_F(BpeTest, MergesByRank) {
  auto tokenizer = build(small_tokenizer());
  EXPECT_EQ(tokenizer.encode("abc"), (Ids{257}));  // bc first, then a + bc
  EXPECT_EQ(tokenizer.encode("ab"), (Ids{256}));
  EXPECT_EQ(tokenizer.encode("abab"), (Ids{256, 256}));
  EXPECT_EQ(tokenizer.encode(""), Ids{});
  EXPECT_EQ(tokenizer.vocab_size(), 302);
}

TEST_F(BpeTest, ReadsMergesOfOlderFiles) {
  Json tree = small_tokenizer();
  tree["model"]["merges"] = Json::parse(R"(["b c", "a b", "a bc"])");
  EXPECT_EQ(build(tree).encode("abc"), (Ids{257}));
}

TEST_F(BpeTest, IgnoreMergesTakesWholeWords) {
  Json tree = small_tokenizer();
  tree["model"]["merges"] = Json::parse(R"(["b c"])");
  EXPECT_EQ(build(tree).encode("abc"), (Ids{'a', 258}));
  tree["model"]["ignore_merges"] = true;
  EXPECT_EQ(build(tree).encode("abc"), (Ids{257}));
}

TEST_F(BpeTest, CutsOutAddedTokensLongestFirst) {
  auto tokenizer = build(small_tokenizer());
  EXPECT_EQ(tokenizer.encode("ab<s>bc<s>><s"), (Ids{256, 300, 258, 301, '<', 's'}));
}

TEST_F(BpeTest, AddsPrefixSpaces) {
  Json tree = small_tokenizer();
  tree["pre_tokenizer"]["add_prefix_space"] = true;
  EXPECT_EQ(build(tree).encode("ab<s> b"), (Ids{' ', 256, 300, ' ', 'b'}));
}

// ---- encoding in blocks

Json split_by(const char* pattern, const char* behavior = "Isolated", bool invert = false) {
  return {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", behavior}, {"invert", invert}};
}

Json byte_level(bool prefix_space, bool use_regex) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", prefix_space}, {"use_regex", use_regex}};
}

std::vector<Json> many_pre_tokenizers() {
  const char* llama3 =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  const char* o200k =
      R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  const Json digits = {{"type", "Digits"}, {"individual_digits", true}};
  std::vector<Json> all = {byte_level(false, true), byte_level(true, true), byte_level(true, false),
                           byte_level(false, false), digits};
  const auto add = [&](const std::vector<Json>& parts) {
    all.push_back({{"type", "Sequence"}, {"pretokenizers", parts}});
  };
  add({split_by(llama3), byte_level(false, false)});
  add({split_by(o200k), byte_level(false, false)});
  // DeepSeek: numbers, then Chinese and Japanese, then words.
  add({split_by(R"(\p{N}{1,3})"), split_by("[一-龥぀-ゟ゠-ヿ]+"), split_by(llama3),
       byte_level(false, false)});
  add({digits, byte_level(true, true)});
  add({byte_level(true, false), split_by(llama3)});
  // A pattern that looks back, one with empty matches, and every behavior.
  add({split_by(R"((?<=b)c|\s+)"), byte_level(false, true)});
  add({split_by("x*"), byte_level(true, false)});
  for (const char* behavior : {"Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"})
    for (const bool invert : {false, true}) add({split_by("[ c]", behavior, invert), byte_level(true, true)});
  return all;
}

// Words, spaces of all kinds, contractions, numbers, other scripts, added tokens whole and in part, and
// bytes that aren't UTF-8.
std::string random_text(std::mt19937& random) {
  static const std::vector<std::string> kParts = {
      "abc",   "ab", "c", "b",  " ",    "  ", "\n",   "\r\n",     " \n",     "\t",     "'s",     "'LL",
      "12345", "7",  "-", "==", "é",    "字", "かな", "x",        "e\u0301", "\u00a0", "\u3000", "<s>",
      "<s>>",  "<s", ">", "<t", "<t>t", "t>", "\xff", "\xe5\xad", "😀",       "A",      "bc"};
  std::string text;
  for (size_t left = random() % 60; left > 0; --left) text += kParts[random() % kParts.size()];
  return text;
}

TEST_F(BpeTest, BlocksOfAnySizeHaveTheTokensOfTheWholeText) {
  Json tree = small_tokenizer();
  tree["added_tokens"].push_back(
      {{"id", 302}, {"content", "<t>t"}, {"special", false}, {"normalized", true}});
  tree["added_tokens"].push_back({{"id", 303}, {"content", "t>"}, {"special", false}, {"normalized", true}});
  std::mt19937 random(7);
  for (const Json& pre_tokenizer : many_pre_tokenizers()) {
    tree["pre_tokenizer"] = pre_tokenizer;
    const auto tokenizer = build(tree);
    for (int round = 0; round < 300; ++round) {
      const std::string text = random_text(random);
      const Ids whole = tokenizer.encode(text);
      const auto encoder = tokenizer.open(text);
      Ids ids;
      while (!encoder->encode_block(random() % 20, ids)) {
      }
      ASSERT_EQ(ids, whole) << pre_tokenizer << "\n" << Json(replace_invalid_utf8(text));
    }
  }
}

// Adds tokens of two bytes and more, up to the whole word.
void add_word(Json& tree, const std::string& word) {
  const auto spelled = [](std::string_view bytes) {
    std::string token;
    for (char byte : bytes) append_utf8(byte_alphabet()[static_cast<unsigned char>(byte)], token);
    return token;
  };
  Json& vocabulary = tree["model"]["vocab"];
  for (size_t size = 2; size <= word.size(); ++size) {
    const std::string_view bytes(word.data(), size);
    if (vocabulary.contains(spelled(bytes))) continue;
    vocabulary[spelled(bytes)] = 400 + vocabulary.size();
    tree["model"]["merges"].push_back({spelled(bytes.substr(0, size - 1)), spelled(bytes.substr(size - 1))});
  }
}

// A document's pieces have its tokens, in any language, wherever it is cut, and however short its last piece
// is. A tokenizer that adds a space to every text that doesn't begin with one needs spaces to cut at.
TEST_F(BpeTest, PiecesHaveTheTokensOfTheDocument) {
  Json tree = small_tokenizer();
  for (const char* word :
       {" слово", "слово", "словарь", " λέξη", "كلمة", "字典", "漢字", "function", " the cat", "123", "\nab"})
    add_word(tree, word);
  const std::vector<std::pair<bool, std::vector<std::string>>> texts = {
      {true, {" слово", " словарь", " о", ", слово", " 1234"}},
      {true, {" λέξη", " ἡ", ".\nλέξη", "·  λέξη"}},
      {true, {" كلمة", " و", "، كلمة"}},
      {true, {" 12345", " 7", " 1234567.89", "\n123"}},
      {true, {" the cat", " don't", " the", "  x", "<s> ab", "\nab", "\n\nab"}},
      {false, {"слово\n", "словарь\n", "字典\n"}},
      {false, {"字典", "漢字", "字", "，", "。", "かな"}},
      {false, {"a=1;", "function(c){", "return c+12}", "b[345]", "==\"x\"", "/*字*/"}}};
  std::mt19937 random(3);
  for (const Json& pre_tokenizer : many_pre_tokenizers()) {
    tree["pre_tokenizer"] = pre_tokenizer;
    const auto tokenizer = std::make_shared<BpeTokenizer>(folder_.write("tokenizer.json", tree.dump()));
    const bool adds_spaces = pre_tokenizer.dump().find(R"("add_prefix_space":true)") != std::string::npos;
    for (const auto& [has_spaces, parts] : texts) {
      if (adds_spaces && !has_spaces) continue;
      for (int round = 0; round < 20; ++round) {
        const size_t piece_bytes = 512 + random() % 300, size = 1800 + random() % 900;
        std::string text;
        while (text.size() < size) text += parts[random() % parts.size()];
        PieceTable pieces(std::make_shared<FakeSource>(std::vector<std::string>{text}),
                          static_cast<int64_t>(piece_bytes), tokenizer);
        Ids ids;
        std::string piece, joined;
        for (int64_t i = 0; i < pieces.size(); ++i) {
          pieces.read(pieces.at(i), piece);
          joined += piece;
          tokenizer->encode_into(piece, ids);
        }
        ASSERT_EQ(joined, text);
        EXPECT_EQ(ids, tokenizer->encode(text)) << pre_tokenizer << ", pieces of " << piece_bytes << " of\n"
                                                << text;
      }
    }
  }
}

// Only what is asked for is encoded, up to the end of a word.
TEST_F(BpeTest, BlocksEndWithTheNextWord) {
  auto tokenizer = build(small_tokenizer());
  std::string text;
  for (int i = 0; i < 10'000; ++i) text += "x y";
  const auto encoder = tokenizer.open(text);
  Ids ids;
  EXPECT_FALSE(encoder->encode_block(100, ids));
  EXPECT_LE(ids.size(), 110u);
}

TEST_F(BpeTest, ReplacesInvalidUtf8) {
  auto tokenizer = build(small_tokenizer());
  EXPECT_EQ(tokenizer.encode("a\xFF"), tokenizer.encode("a\uFFFD"));
  EXPECT_EQ(tokenizer.decode(Ids{0xE2, 0x82}), "\uFFFD");
  EXPECT_EQ(tokenizer.decode(Ids{0xE2, 0x82, 0xAC, 300}), "€<s>");
  EXPECT_THROW(tokenizer.decode(Ids{302}), Error);
  EXPECT_THROW(tokenizer.decode(Ids{-1}), Error);
}

TEST_F(BpeTest, SplitsBehaveAsNamed) {
  auto words = [&](const char* behavior, bool invert) {
    Json tree = small_tokenizer();
    Json split = {
        {"type", "Split"}, {"pattern", {{"String", "c"}}}, {"behavior", behavior}, {"invert", invert}};
    Json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
    tree["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", Json::array({split, bytes})}};
    return build(tree).encode("abcab");
  };
  EXPECT_EQ(words("Isolated", false), (Ids{256, 'c', 256}));
  EXPECT_EQ(words("Removed", false), (Ids{256, 256}));
  EXPECT_EQ(words("Removed", true), (Ids{'c'}));
  EXPECT_EQ(words("MergedWithPrevious", false), (Ids{257, 256}));
  EXPECT_EQ(words("MergedWithNext", false), (Ids{256, 'c', 256}));
}

TEST_F(BpeTest, TakesBosAndEosFromTheTemplateOrTheConfig) {
  Json tree = small_tokenizer();
  tree["post_processor"] = Json::parse(R"({"type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]})");
  EXPECT_EQ(build(tree).bos_id(), 300);
  EXPECT_EQ(build(tree).eos_id(), std::nullopt);
  folder_.write("tokenizer_config.json", R"({"bos_token": null, "eos_token": {"content": "<s>>"}})");
  EXPECT_EQ(build(tree).bos_id(), 300);
  EXPECT_EQ(build(tree).eos_id(), 301);
  folder_.write("tokenizer_config.json", R"({"bos_token": "<nowhere>"})");
  EXPECT_NE(refusal(tree).find("<nowhere>"), std::string::npos);
}

TEST_F(BpeTest, NamesUnsupportedParts) {
  auto with = [](const char* pointer, Json value) {
    Json tree = small_tokenizer();
    tree[Json::json_pointer(pointer)] = std::move(value);
    return tree;
  };
  EXPECT_NE(refusal(with("/model/type", "Unigram")).find("Unigram"), std::string::npos);
  EXPECT_NE(refusal(with("/model/byte_fallback", true)).find("byte_fallback"), std::string::npos);
  EXPECT_NE(refusal(with("/normalizer", {{"type", "NFC"}})).find("NFC"), std::string::npos);
  EXPECT_NE(refusal(with("/pre_tokenizer", {{"type", "Metaspace"}})).find("Metaspace"), std::string::npos);
  EXPECT_NE(refusal(with("/decoder", {{"type", "Fuse"}})).find("Fuse"), std::string::npos);
  EXPECT_NE(refusal(with("/added_tokens/0/lstrip", true)).find("lstrip"), std::string::npos);
  EXPECT_NE(refusal(with("/model/merges/0", "x y z")).find("x y z"), std::string::npos);
  EXPECT_NE(refusal(with("/model/vocab/a", -3)).find("-3"), std::string::npos);
  EXPECT_EQ(refusal(with("/normalizer", Json::parse(R"({"type": "Sequence", "normalizers": []})"))), "");
  EXPECT_NE(refusal(with("/decoder", Json::parse(R"({"type": "Sequence", "decoders": {"x": 1}})"))), "");
  EXPECT_NE(refusal(with("/added_tokens", 7)), "");
  EXPECT_NE(refusal(with("/pre_tokenizer", "ByteLevel")), "");
  EXPECT_NE(refusal(with("/added_tokens/0/id", 200'000'000)).find("200000000"), std::string::npos);
  EXPECT_NE(refusal(with("/pre_tokenizer", Json::parse(std::string(65, '[') + std::string(65, ']')))), "");
  Json tree = small_tokenizer();
  tree["model"]["vocab"].erase("z");
  EXPECT_NE(refusal(tree).find("122"), std::string::npos);
  EXPECT_NE(message_of<ConfigError>([&] { BpeTokenizer(folder_.write("bad.json", "{")); }).find("bad.json"),
            std::string::npos);
  const std::string hidden = small_tokenizer().dump() + std::string(1, '\0') + "more";
  EXPECT_NE(message_of<ConfigError>([&] { BpeTokenizer(folder_.write("nul.json", hidden)); }).find("NUL"),
            std::string::npos);
}

// The ids and texts in tokenizer_golden.json are the `tokenizers` package's
// (scripts/make_tokenizer_golden.py).
TEST(RepositoryTokenizer, EqualsTheTokenizersPackage) {
  std::ifstream file(TITAN_SOURCE_DIR "/tests/unit/data/tokenizer_golden.json");
  auto tokenizer = build_tokenizer(TITAN_SOURCE_DIR "/assets/tokenizer");
  for (const Json& sample : Json::parse(file)) {
    auto ids = sample.at("ids").get<Ids>();
    EXPECT_EQ(tokenizer->encode(sample.at("text").get<std::string>()), ids) << sample.at("text");
    EXPECT_EQ(tokenizer->decode(ids), sample.at("text").get<std::string>());
  }
  EXPECT_EQ(tokenizer->vocab_size(), 2048);
  EXPECT_EQ(tokenizer->bos_id(), 2046);
  EXPECT_EQ(tokenizer->eos_id(), 2047);
}

TEST(RepositoryTokenizer, IsSharedByThreads) {
  auto tokenizer = build_tokenizer(TITAN_SOURCE_DIR "/assets/tokenizer");
  std::ifstream file(TITAN_SOURCE_DIR "/tests/unit/data/tokenizer_test.cpp");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  Ids expected = tokenizer->encode(text);
  std::vector<Ids> got(4);
  {
    std::vector<std::jthread> threads;
    for (auto& ids : got)
      threads.emplace_back([&] {
        for (int i = 0; i < 20; ++i) ids = tokenizer->encode(text);
      });
  }
  for (const auto& ids : got) EXPECT_EQ(ids, expected);
  EXPECT_EQ(tokenizer->decode(expected), text);
}

TEST(ByteTokenizer, KeepsEveryByte) {
  ByteTokenizer tokenizer;
  std::string text("a\0\xFF\n", 4);
  EXPECT_EQ(tokenizer.encode(text), (Ids{'a', 0, 255, '\n'}));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  EXPECT_EQ(tokenizer.decode(Ids{ByteTokenizer::kBos, 'a', ByteTokenizer::kEos}), "a");
  EXPECT_THROW(tokenizer.decode(Ids{258}), Error);
}

TEST(BuildTokenizer, FindsOrRefuses) {
  EXPECT_EQ(build_tokenizer("bytes")->vocab_size(), 258);
  EXPECT_THROW(build_tokenizer("/nowhere"), ConfigError);
  EXPECT_NO_THROW(check_vocabulary(ByteTokenizer(), 258));
  auto message = message_of<ConfigError>([] { check_vocabulary(ByteTokenizer(), 256); });
  EXPECT_NE(message.find("258"), message.npos);
  EXPECT_NE(message.find("256"), message.npos);
}

TEST(TokenizerKinds, UsersAddKinds) {
  class Offset : public ByteTokenizer {
   public:
    explicit Offset(std::string argument) : argument_(std::move(argument)) {}
    std::string fingerprint() const override { return "offset " + argument_; }

   private:
    std::string argument_;
  };
  tokenizer_kinds().add("offset",
                        [](const std::string& argument) { return std::make_shared<Offset>(argument); });
  EXPECT_EQ(build_tokenizer("offset:3")->fingerprint(), "offset 3");
  EXPECT_EQ(build_tokenizer("offset")->fingerprint(), "offset ");
  EXPECT_TRUE(names_tokenizer_kind("bytes"));
  EXPECT_FALSE(names_tokenizer_kind("assets/tokenizer"));
}

}  // namespace
}  // namespace titan::data
