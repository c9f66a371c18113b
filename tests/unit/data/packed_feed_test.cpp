#include "data/feed/feeds.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "fake_source.h"
#include "titan/data/tokenizer.h"

namespace titan::data {
namespace {

using Tokens = std::vector<int64_t>;
constexpr int64_t kBos = ByteTokenizer::kBos, kEos = ByteTokenizer::kEos;

std::shared_ptr<PackedFeed> feed_of(std::vector<std::string> documents, PackingOptions options) {
  return std::make_shared<PackedFeed>(std::make_shared<FakeSource>(std::move(documents)),
                                      std::make_shared<ByteTokenizer>(), options);
}

struct Sample {
  Tokens input, labels;
  int64_t valid;
};

Sample next(Lane& lane, int64_t length) {
  Sample sample{Tokens(length), Tokens(length), 0};
  sample.valid = lane.fill({sample.input, sample.labels});
  return sample;
}

Tokens documents_tokens(const std::vector<std::string>& documents) {
  Tokens stream;
  for (const auto& document : documents) {
    stream.push_back(kBos);
    for (unsigned char c : document) stream.push_back(c);
    stream.push_back(kEos);
  }
  return stream;
}

// The tokens of a sample: the inputs and the last label.
Tokens tokens_of(const Sample& sample) {
  if (sample.valid == 0) return {};
  Tokens tokens(sample.input.begin(), sample.input.begin() + sample.valid);
  tokens.push_back(sample.labels[sample.valid - 1]);
  return tokens;
}

// All tokens of the piece dealt at a position: those that a lane takes, two at a time, before its next piece.
Tokens piece_tokens(const PackedFeed& feed, int64_t epoch, int64_t position) {
  Tokens tokens;
  auto lane = feed.open({.epoch = epoch, .position = position}, feed.num_pieces());
  for (;;) {
    const Sample sample = next(*lane, 1);
    const LaneState state = lane->state();
    const bool goes_on = state.epoch == epoch;
    if (goes_on || state.token_offset == 1) tokens.push_back(sample.input[0]);
    if (!goes_on) return tokens;
    tokens.push_back(sample.labels[0]);
  }
}

TEST(PackedFeed, PacksDocumentsWithoutOverlap) {
  auto documents = numbered_documents(9);
  auto feed = feed_of(documents, {.shuffle = false});
  auto lane = feed->open(feed->start(0, 1), 1);
  Tokens expected = documents_tokens(documents), stream;
  while (stream.size() < expected.size()) {
    Sample sample = next(*lane, 7);
    EXPECT_EQ(sample.valid, 7);
    EXPECT_TRUE(std::equal(sample.input.begin() + 1, sample.input.end(), sample.labels.begin()));
    Tokens tokens = tokens_of(sample);
    stream.insert(stream.end(), tokens.begin(), tokens.end());
  }
  stream.resize(expected.size());
  EXPECT_EQ(stream, expected);
}

TEST(PackedFeed, DealsEveryPieceOncePerEpochInANewOrder) {
  auto feed = feed_of(numbered_documents(40), {.seed = 5});
  auto order_of = [&](int64_t epoch) {
    std::vector<Tokens> pieces(40);
    for (int64_t p = 0; p < 40; ++p) pieces[p] = piece_tokens(*feed, epoch, p);
    return pieces;
  };
  auto first = order_of(0), second = order_of(1);
  EXPECT_NE(first, second);
  std::sort(first.begin(), first.end());
  std::sort(second.begin(), second.end());
  EXPECT_EQ(first, second);
  EXPECT_EQ(std::unique(first.begin(), first.end()), first.end());
}

// The pieces of a large file are dealt, not the file.
TEST(PackedFeed, ASingleFileFeedsAllLanesEvenly) {
  std::string text(1 << 20, 'x');
  auto feed = feed_of({text}, {.piece_bytes = 4096, .repeat = false});
  std::vector<int64_t> tokens;
  for (int64_t l = 0; l < 16; ++l) {
    auto lane = feed->open(feed->start(l, 16), 16);
    int64_t count = 0;
    while (int64_t valid = next(*lane, 255).valid) count += valid + 1;
    tokens.push_back(count);
  }
  for (int64_t count : tokens) EXPECT_NEAR(count, (1 << 20) / 16, 300);
}

TEST(PackedFeed, EndsADocumentOnlyAfterItsLastPiece) {
  auto feed = feed_of({std::string(100, 'x')}, {.piece_bytes = 64, .shuffle = false});
  auto first = piece_tokens(*feed, 0, 0), second = piece_tokens(*feed, 0, 1);
  EXPECT_EQ(first.front(), kBos);
  EXPECT_EQ(first.back(), 'x');
  EXPECT_EQ(second.front(), kBos);
  EXPECT_EQ(second.back(), kEos);
}

// A piece is tokenized block by block. The tokens are those of the whole text, also if no line ends, no word
// ends or there are no words at all.
TEST(PackedFeed, EncodingInBlocksDoesNotChangeTheTokens) {
  auto tokenizer = build_tokenizer(TITAN_SOURCE_DIR "/assets/tokenizer");
  for (const std::string part : {"int width = 0;\n  return width;\n\n", "of the many words, ", "many words",
                                 "字", "    ", "\n", " \n", "=", "0", "don't  \t "}) {
    std::string text;
    for (int i = 0; text.size() < 90'000; ++i) {
      text += part;
      if (part.size() > 6 && i % 3 == 0) text += std::to_string(i);
    }
    std::vector<int32_t> whole = {*tokenizer->bos_id()};
    tokenizer->encode_into(text, whole);
    whole.push_back(*tokenizer->eos_id());
    auto feed = std::make_shared<PackedFeed>(std::make_shared<FakeSource>(std::vector<std::string>{text}),
                                             tokenizer, PackingOptions{.repeat = false});
    Sample all = next(*feed->open(feed->start(0, 1), 1), static_cast<int64_t>(whole.size()) - 1);
    EXPECT_EQ(tokens_of(all), Tokens(whole.begin(), whole.end())) << part;
  }
}

// A document's pieces have its tokens: they are cut between words. Other tokenizers: tokenizer_test.cpp.
TEST(PackedFeed, CuttingIntoPiecesDoesNotChangeTheTokens) {
  auto tokenizer = build_tokenizer(TITAN_SOURCE_DIR "/assets/tokenizer");
  std::string text;
  for (int i = 0; text.size() < 20'000; ++i)
    text += i % 7 == 0 ? " don't   " : i % 5 == 0 ? ".\n\n" : i % 3 == 0 ? " internationally" : " word";
  const std::vector<int32_t> whole = tokenizer->encode(text);
  for (int64_t piece_bytes = 512; piece_bytes < 700; ++piece_bytes) {
    PieceTable pieces(std::make_shared<FakeSource>(std::vector<std::string>{text}), piece_bytes, tokenizer);
    std::vector<int32_t> ids;
    std::string piece;
    for (int64_t i = 0; i < pieces.size(); ++i) {
      pieces.read(pieces.at(i), piece);
      tokenizer->encode_into(piece, ids);
    }
    ASSERT_EQ(ids, whole) << piece_bytes;
  }
}

TEST(PackedFeed, StatesContinueWithinALongPiece) {
  std::string text;
  for (int i = 0; i < 20'000; ++i) text += std::to_string(i) + "\n";
  auto feed = feed_of({text}, {});
  auto lane = feed->open(feed->start(0, 1), 1);
  for (int i = 0; i < 6; ++i) {
    for (int k = 0; k < 9; ++k) next(*lane, 1999);
    auto resumed = feed->open(lane->state(), 1);
    EXPECT_EQ(next(*resumed, 500).labels, next(*feed->open(lane->state(), 1), 500).labels);
    resumed = feed->open(lane->state(), 1);
    EXPECT_EQ(next(*lane, 1999).labels, next(*resumed, 1999).labels);
  }
}

TEST(PackedFeed, StatesContinueExactly) {
  auto feed = feed_of(numbered_documents(13), {.seed = 1});
  for (int64_t lanes : {1, 4, 20}) {  // 20: more lanes than documents
    auto lane = feed->open(feed->start(lanes - 1, lanes), lanes);
    for (int i = 0; i < 60; ++i) {
      auto resumed = feed->open(lane->state(), lanes);
      for (int k = 0; k < 3; ++k) {
        auto copy = feed->open(resumed->state(), lanes);
        EXPECT_EQ(next(*resumed, 9).input, next(*copy, 9).input);
      }
      resumed = feed->open(lane->state(), lanes);
      EXPECT_EQ(next(*lane, 9).labels, next(*resumed, 9).labels);
    }
  }
}

TEST(PackedFeed, FiniteFeedGivesEveryTokenOnce) {
  auto documents = numbered_documents(17);
  auto feed = feed_of(documents, {.shuffle = false, .repeat = false});
  EXPECT_EQ(feed->num_steps(), std::nullopt);  // finding out would take reading all documents
  for (int64_t lanes : {1, 3, 5, 30}) {
    for (int64_t l = 0; l < lanes; ++l) {
      std::vector<std::string> own;
      for (int64_t i = l; i < 17; i += lanes) own.push_back(documents[i]);
      Tokens expected = documents_tokens(own), stream;
      auto lane = feed->open(feed->start(l, lanes), lanes);
      const auto rows = static_cast<int64_t>(expected.size()) / 13 + 1;
      for (int64_t row = 0; row < rows + 2; ++row) {
        Sample sample = next(*lane, 12);
        Tokens tokens = tokens_of(sample);
        stream.insert(stream.end(), tokens.begin(), tokens.end());
        if (row >= rows) EXPECT_EQ(sample.valid, 0);
        EXPECT_EQ(std::count(sample.labels.begin(), sample.labels.end(), kIgnoredLabel), 12 - sample.valid);
      }
      // A single token at the end has no label.
      EXPECT_LE(expected.size() - stream.size(), 1u);
      expected.resize(stream.size());
      EXPECT_EQ(stream, expected);
    }
  }
}

TEST(PackedFeed, RedealingRepeatsNothing) {
  constexpr int64_t kDocuments = 50;
  auto feed = feed_of(numbered_documents(kDocuments), {.shuffle = false});
  std::vector<LaneState> states;
  std::vector<int64_t> begun;  // documents, in the order of the feed
  for (int64_t l = 0; l < 4; ++l) {
    auto lane = feed->open(feed->start(l, 4), 4);
    for (int64_t i = 0; i < 3 + l; ++i) next(*lane, 30);
    states.push_back(lane->state());
    begun.push_back(states.back().position);
  }
  auto dealt = feed->redeal(states, 6);
  ASSERT_EQ(dealt.size(), 6u);
  int64_t next_document = *std::max_element(begun.begin(), begun.end());
  for (int64_t l = 0; l < 6; ++l) {
    EXPECT_EQ(dealt[l].lane, l);
    EXPECT_EQ(dealt[l].token_offset, 0);
    int64_t place = dealt[l].epoch * kDocuments + dealt[l].position;
    EXPECT_GT(place, next_document);
    EXPECT_EQ(place, dealt[0].position + l);
  }
}

TEST(PackedFeed, RefusesDocumentsWithoutTokens) {
  class Silent : public ByteTokenizer {
    std::optional<int32_t> bos_id() const override { return std::nullopt; }
    std::optional<int32_t> eos_id() const override { return std::nullopt; }
  };
  auto feed = std::make_shared<PackedFeed>(std::make_shared<FakeSource>(std::vector<std::string>(5)),
                                           std::make_shared<Silent>(), PackingOptions{});
  auto lane = feed->open(feed->start(0, 2), 2);
  EXPECT_THROW(next(*lane, 4), Error);
}

// From samples, without reading everything.
TEST(PackedFeed, MeasuresItsSize) {
  struct FastSource : FakeSource {
    using FakeSource::FakeSource;
    bool reads_fast() const override { return true; }
  };
  const std::vector<std::string> documents = {std::string(100'000, 'x'), std::string(1000, '\xff'), ""};
  const auto measure = [&](std::shared_ptr<const Source> source) {
    return PackedFeed(std::move(source), std::make_shared<ByteTokenizer>(), {.piece_bytes = 10'000})
        .measure();
  };
  const auto source = std::make_shared<FastSource>(documents);
  const FeedSize size = measure(source);
  EXPECT_EQ(size.documents, 3);
  EXPECT_EQ(size.bytes, 101'000);
  EXPECT_EQ(size.tokens, 101'000 + 12 + 3);           // 12 pieces and 3 documents
  EXPECT_NEAR(size.invalid, 1000 / 42'000.0, 0.001);  // ten samples of one document, and all of another
  EXPECT_FALSE(size.is_exact);
  EXPECT_LE(source->reads().size(), 12u);
  const auto slow = std::make_shared<FakeSource>(documents);
  EXPECT_EQ(measure(slow).tokens, 0);
  EXPECT_TRUE(slow->reads().empty());
}

TEST(PackedFeed, FingerprintsNameEverythingThatMatters) {
  auto print = [](PackingOptions options) { return feed_of({"x"}, options)->fingerprint(); };
  EXPECT_EQ(print({}), print({}));
  EXPECT_NE(print({}), print({.piece_bytes = 100}));
  EXPECT_NE(print({}), print({.shuffle = false}));
  EXPECT_NE(print({}), print({.seed = 1}));
  EXPECT_NE(feed_of({"x", "y"}, {})->fingerprint(), print({}));
}

}  // namespace
}  // namespace titan::data
