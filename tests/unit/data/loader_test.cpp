#include "titan/data/loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <set>
#include <thread>

#include "data/feed/feeds.h"
#include "fake_source.h"
#include "temporary_folder.h"
#include "titan/data/tokenizer.h"

namespace titan::data {
namespace {

using Tokens = std::vector<int64_t>;
using Rows = std::multiset<std::pair<Tokens, Tokens>>;

constexpr int64_t kLength = 11;

std::shared_ptr<PackedFeed> make_feed(std::shared_ptr<FakeSource> source,
                                      PackingOptions options = {.piece_bytes = 64, .seed = 3}) {
  return std::make_shared<PackedFeed>(std::move(source), std::make_shared<ByteTokenizer>(), options);
}

std::shared_ptr<PackedFeed> make_feed(PackingOptions options = {.piece_bytes = 64, .seed = 3}) {
  return make_feed(std::make_shared<FakeSource>(numbered_documents(30)), options);
}

LoaderOptions shape(int64_t lanes, int64_t dp_rank = 0, int64_t dp_size = 1, int64_t local_batch = 2) {
  return {.dp_rank = dp_rank,
          .dp_size = dp_size,
          .global_batch_size = lanes,
          .local_batch_size = local_batch,
          .seq_len = kLength};
}

Tokens row_of(const at::Tensor& tensor, int64_t row) {
  const int64_t* data = tensor.const_data_ptr<int64_t>() + row * tensor.size(1);
  return Tokens(data, data + tensor.size(1));
}

// The rows of a batch that have labels, after checking the batch's count.
void collect(const Batch& batch, Rows& rows) {
  int64_t valid = 0;
  for (int64_t row = 0; row < batch.labels_BS.size(0); ++row) {
    Tokens labels = row_of(batch.labels_BS, row);
    int64_t ignored = std::count(labels.begin(), labels.end(), kIgnoredLabel);
    valid += static_cast<int64_t>(labels.size()) - ignored;
    if (ignored < static_cast<int64_t>(labels.size())) rows.emplace(row_of(batch.input_BS, row), labels);
  }
  EXPECT_EQ(valid, batch.valid_tokens);
}

// One loader per rank, like the ranks of a run.
class Ranks {
 public:
  Ranks(const std::shared_ptr<const Feed>& feed, int64_t lanes, int64_t dp_size, int64_t local_batch) {
    for (int64_t r = 0; r < dp_size; ++r) loaders_.emplace_back(feed, shape(lanes, r, dp_size, local_batch));
  }

  // The next step's rows of all ranks; none when all ranks are at the end.
  std::optional<Rows> next() {
    Rows rows;
    size_t ended = 0;
    for (auto& loader : loaders_) {
      auto step = loader.next_step();
      ended += !step;
      if (!step) continue;
      EXPECT_EQ(static_cast<int64_t>(step->size()), loaders_[0].num_micro_batches());
      for (const auto& batch : *step) collect(batch, rows);
    }
    EXPECT_TRUE(ended == 0 || ended == loaders_.size()) << "ranks end at different steps";
    return ended ? std::nullopt : std::optional(rows);
  }

  LoaderState state() const {
    std::vector<LoaderState> parts;
    for (const auto& loader : loaders_) parts.push_back(loader.state());
    return merge(parts);
  }
  void load(const LoaderState& state) {
    for (auto& loader : loaders_) loader.load_state(state);
  }

 private:
  std::vector<DataLoader> loaders_;
};

struct Layout {
  int64_t dp_size;
  int64_t local_batch;
};
// Even and uneven degrees, with and without gradient accumulation, and more ranks than lanes.
constexpr Layout kLayouts[] = {{1, 8}, {1, 2}, {1, 3}, {2, 4}, {2, 1},
                               {3, 3}, {3, 1}, {4, 2}, {5, 2}, {11, 1}};

TEST(Loader, AStepHasTheSameRowsOnAnyLayout) {
  auto feed = make_feed();
  std::vector<Rows> expected;
  Ranks single(feed, 8, 1, 8);
  for (int step = 0; step < 25; ++step) expected.push_back(single.next().value());
  EXPECT_EQ(std::set<Rows>(expected.begin(), expected.end()).size(), expected.size());
  for (auto [dp_size, local_batch] : kLayouts) {
    Ranks ranks(feed, 8, dp_size, local_batch);
    for (const auto& rows : expected) EXPECT_EQ(ranks.next(), rows) << dp_size << " ranks of " << local_batch;
  }
}

TEST(Loader, ResumesOnAnyLayout) {
  auto feed = make_feed();
  for (auto [dp_size, local_batch] : kLayouts) {
    Ranks whole(feed, 8, 1, 8);
    Ranks before(feed, 8, dp_size, local_batch);
    for (int step = 0; step < 7; ++step) EXPECT_EQ(before.next(), whole.next());
    LoaderState state = loader_state_from_json(to_json(before.state()));
    EXPECT_EQ(state.steps, 7);
    for (int64_t other : {1, 2, 3}) {
      Ranks after(feed, 8, other, 3), reference(feed, 8, 1, 8);
      after.load(state);
      reference.load(whole.state());
      for (int step = 0; step < 10; ++step)
        EXPECT_EQ(after.next(), reference.next()) << dp_size << " -> " << other;
      EXPECT_EQ(after.state(), reference.state());
    }
  }
}

TEST(Loader, RedealsForAnotherGlobalBatchSize) {
  auto feed = make_feed();
  Ranks before(feed, 8, 2, 4);
  for (int step = 0; step < 3; ++step) before.next();
  Ranks one(feed, 5, 1, 5), three(feed, 5, 3, 1);
  one.load(before.state());
  three.load(before.state());
  for (int step = 0; step < 10; ++step) EXPECT_EQ(one.next(), three.next());
}

TEST(Loader, ThreadsAndPrefetchingChangeNothing) {
  auto feed = make_feed();
  auto run = [&](int64_t workers, int64_t ahead) {
    LoaderOptions options = shape(8, 0, 1, 4);
    options.settings = {.num_workers = workers, .prefetch_factor = ahead};
    DataLoader loader(feed, options);
    std::vector<Tokens> rows;
    std::vector<LoaderState> states;
    for (int step = 0; step < 20; ++step) {
      auto batches = loader.next_step().value();
      if (step % 5 == 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(2));  // lets the threads run ahead
      for (const auto& batch : batches)
        for (int64_t row = 0; row < 4; ++row) rows.push_back(row_of(batch.input_BS, row));
      states.push_back(loader.state());
    }
    return std::pair(rows, states);
  };
  auto expected = run(1, 1);
  EXPECT_EQ(run(1, 16), expected);
  EXPECT_EQ(run(3, 2), expected);
  EXPECT_EQ(run(50, 5), expected);
}

TEST(Loader, ARankReadsOnlyItsLanes) {
  auto source = std::make_shared<FakeSource>(std::vector<std::string>(1000, std::string(200, 'x')));
  LoaderOptions options = shape(8, 1, 4, 2);
  options.settings.prefetch_factor = 1;
  DataLoader loader(make_feed(source, {.shuffle = false}), options);
  for (int step = 0; step < 20; ++step) loader.next_step();
  auto reads = source->reads();
  EXPECT_LE(reads.size(), 2 * (21 * (kLength + 1) / 202 + 1u));
  for (auto [document, begin] : reads) EXPECT_TRUE(document % 8 == 1 || document % 8 == 5) << document;
}

TEST(Loader, GivesMicroBatchesOneByOne) {
  auto feed = make_feed();
  DataLoader steps(feed, shape(8, 0, 2, 2)), single(feed, shape(8, 0, 2, 2));
  for (int step = 0; step < 4; ++step) {
    const auto whole_step = steps.next_step().value();
    for (const auto& expected : whole_step) {
      auto batch = single.next().value();
      EXPECT_TRUE(batch.input_BS.equal(expected.input_BS));
      EXPECT_TRUE(batch.labels_BS.equal(expected.labels_BS));
      EXPECT_EQ(batch.input_BS.sizes(), (std::vector<int64_t>{2, kLength}));
      EXPECT_TRUE(batch.input_BS.is_contiguous());
    }
    EXPECT_EQ(single.state(), steps.state());
  }
  single.next();
  EXPECT_THROW(single.state(), Error);
  EXPECT_THROW(single.next_step(), Error);
}

TEST(Loader, FiniteFeedEndsAfterReadingEachPieceOnce) {
  std::optional<Rows> all;
  for (auto [dp_size, local_batch] : kLayouts) {
    auto source = std::make_shared<FakeSource>(numbered_documents(30));
    auto feed = make_feed(source, {.piece_bytes = 100, .shuffle = false, .repeat = false});
    Ranks ranks(feed, 8, dp_size, local_batch);
    Rows rows;
    for (Rows step = ranks.next().value(); !step.empty(); step = ranks.next().value())
      rows.insert(step.begin(), step.end());
    EXPECT_TRUE(ranks.next().value().empty());
    if (!all) all = rows;
    EXPECT_EQ(rows, *all);
    auto reads = source->reads();
    EXPECT_EQ(static_cast<int64_t>(reads.size()), feed->num_pieces());
    EXPECT_EQ(std::set(reads.begin(), reads.end()).size(), reads.size());
  }
}

TEST(Loader, RestartsAtTheBeginning) {
  DataLoader loader(make_feed({.repeat = false}), shape(4));
  auto first = loader.next_step().value();
  for (int step = 0; step < 200; ++step) loader.next_step();
  loader.restart();
  EXPECT_TRUE(loader.next_step().value()[0].input_BS.equal(first[0].input_BS));
  EXPECT_EQ(loader.state().steps, 1);
}

TEST(Loader, ThrowsAtTheStepThatNeedsTheUnreadableDocument) {
  auto source =
      std::make_shared<FakeSource>(std::vector<std::string>(64, std::string(4 * (kLength + 1) - 2, 'x')));
  source->unreadable = 8;  // lane 0's third document: its steps 8 and later
  LoaderOptions options = shape(4);
  options.settings.prefetch_factor = 6;
  options.settings.num_workers = 2;
  DataLoader loader(make_feed(source, {.shuffle = false}), options);
  for (int step = 0; step < 8; ++step) EXPECT_NO_THROW(loader.next_step()) << step;
  for (int again = 0; again < 2; ++again)
    EXPECT_NE(message_of<Error>([&] { loader.next_step(); }).find("document 8 can't be read"),
              std::string::npos);
}

TEST(Loader, ReusesMemoryButNeverThatOfAHeldBatch) {
  DataLoader loader(make_feed(), shape(4));
  std::vector<Batch> held = loader.next_step().value();
  at::Tensor copy = held[0].input_BS.clone();
  std::set<const void*> buffers;
  for (int step = 0; step < 200; ++step)
    buffers.insert(loader.next_step().value()[0].input_BS.const_data_ptr());
  EXPECT_TRUE(held[0].input_BS.equal(copy));
  EXPECT_LE(buffers.size(), 8u);
}

TEST(Loader, DestructorStopsRunningWorkers) {
  auto feed = make_feed();
  for (int i = 0; i < 50; ++i) {
    DataLoader loader(feed, shape(8));
    if (i % 2) loader.next_step();
  }
}

TEST(Loader, RefusesOtherDataAndNamesTheDifference) {
  DataLoader one(make_feed(), shape(4));
  one.next_step();
  auto message_for = [&](const std::shared_ptr<PackedFeed>& feed) {
    DataLoader other(feed, shape(4));
    return message_of<Error>([&] { other.load_state(one.state()); });
  };
  auto order = message_for(make_feed({.piece_bytes = 64, .seed = 4}));
  EXPECT_NE(order.find("order was 'shuffled by 3', is now 'shuffled by 4'."), order.npos) << order;
  EXPECT_EQ(order.find("source"), order.npos) << order;
  auto documents = std::make_shared<FakeSource>(numbered_documents(31));
  auto source = message_for(make_feed(documents, {.piece_bytes = 65, .seed = 3}));
  EXPECT_NE(
      source.find("source was 'fake:30', is now 'fake:31'; pieces was '64 bytes cut between tokens', is "
                  "now '65 bytes cut between tokens'."),
      source.npos)
      << source;
}

TEST(Loader, RefusesStatesThatDoNotFit) {
  auto feed = make_feed();
  DataLoader half(feed, shape(4, 0, 2)), whole(feed, shape(4));
  EXPECT_NE(message_of<Error>([&] { whole.load_state(half.state()); }).find("lane 1"), std::string::npos);
  EXPECT_THROW(merge({half.state(), half.state()}), Error);
  EXPECT_THROW(merge({}), Error);
  EXPECT_THROW(loader_state_from_json("{}"), Error);
  EXPECT_THROW(loader_state_from_json("nothing"), Error);
  LoaderState state = whole.state();
  state.lanes[2].position = 1'000'000;
  EXPECT_NE(message_of<Error>([&] { whole.check_state(state); }).find("lane 2"), std::string::npos);
  EXPECT_NE(message_of<Error>([&] { whole.load_state(state); }).find("lane 2"), std::string::npos);
  DataLoader other(feed, shape(3));  // needs the lanes to be dealt again
  EXPECT_NE(message_of<Error>([&] { other.load_state(state); }).find("lane 2"), std::string::npos);
  state.lanes[2] = {.lane = 2, .epoch = std::numeric_limits<int64_t>::max() / 8};
  EXPECT_NE(message_of<Error>([&] { other.load_state(state); }).find("lane 2"), std::string::npos);
}

// A checkpoint may be untrusted.
TEST(Loader, RefusesMalformedStates) {
  const auto text = [](const std::string& lanes, const std::string& steps = "3") {
    return R"({"steps":)" + steps + R"(,"num_lanes":1,"feed":"f","lanes":)" + lanes + "}";
  };
  EXPECT_EQ(loader_state_from_json(text("[[0,1,2,3]]")).lanes[0], (LaneState{0, 1, 2, 3}));
  for (const char* lanes :
       {"[[0,0,-1,0]]", "[[0,0,0]]", "[[0,0,0,0,0]]", "[[0,0,1.5,0]]", "[[0,0,1e300,0]]",
        "[[0,0,9223372036854775807,0]]", "[[0,0,18446744073709551615,0]]", "[0]", "{}", "7"})
    EXPECT_THROW(loader_state_from_json(text(lanes)), Error) << lanes;
  for (const char* steps : {"-1", "1.0", "\"1\"", "18446744073709551615", "null"})
    EXPECT_THROW(loader_state_from_json(text("[[0,1,2,3]]", steps)), Error) << steps;
  const std::string deep(1'000'000, '[');
  EXPECT_NE(message_of<Error>([&] { loader_state_from_json(text(deep)); }).find("deeper"), std::string::npos);
}

TEST(Loader, RefusesImpossibleShapes) {
  auto feed = make_feed();
  EXPECT_THROW(DataLoader(feed, shape(0)), ConfigError);
  EXPECT_THROW(DataLoader(feed, shape(4, 0, 1, 0)), ConfigError);
  EXPECT_THROW(DataLoader(feed, shape(4, 2, 2)), Error);
  EXPECT_EQ(DataLoader(feed, shape(-1, 0, 3, 5)).num_lanes(), 15);
}

TEST(Loader, RepeatsAStepThatIsTakenBack) {
  auto feed = make_feed();
  DataLoader loader(feed, shape(4)), plain(feed, shape(4));
  loader.next_step();
  plain.next_step();
  const LoaderState before = loader.state();
  const Tokens first = row_of(loader.next_step()->at(0).input_BS, 0);
  loader.take_back_step();
  EXPECT_EQ(to_json(loader.state()), to_json(before));
  EXPECT_THROW(loader.take_back_step(), Error);
  for (int step = 0; step < 3; ++step) {
    const auto again = loader.next_step(), expected = plain.next_step();
    EXPECT_TRUE(at::equal(again->at(1).input_BS, expected->at(1).input_BS)) << step;
    if (step == 0) EXPECT_EQ(row_of(again->at(0).input_BS, 0), first);
  }
}

TEST(Loader, TakesBackTheEmptyStepOfARankWithoutLanes) {
  DataLoader loader(make_feed(), shape(2, 2, 3));
  loader.next_step();
  loader.take_back_step();
  EXPECT_EQ(loader.state().steps, 0);
}

/// Its reads don't return until let_go() is called.
class HangingSource : public FakeSource {
 public:
  HangingSource() : FakeSource(numbered_documents(30)) {}
  void read(int64_t i, int64_t begin, int64_t count, std::string& text) const override {
    std::unique_lock lock(mutex_);
    let_go_.wait(lock, [&] { return is_free_; });
    lock.unlock();
    FakeSource::read(i, begin, count, text);
  }
  void let_go() {
    const std::lock_guard lock(mutex_);
    is_free_ = true;
    let_go_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable let_go_;
  bool is_free_ = false;
};

TEST(Loader, WaitReportsWhetherAStepIsReady) {
  using std::chrono::milliseconds;
  auto source = std::make_shared<HangingSource>();
  DataLoader loader(make_feed(source), shape(4));
  EXPECT_FALSE(loader.wait(milliseconds(20)));
  source->let_go();
  EXPECT_TRUE(loader.wait(milliseconds(5000)));
  EXPECT_TRUE(loader.next_step());
}

// As when a run is stopped while its file system doesn't answer.
TEST(Loader, AbandonsReadingThatHangs) {
  auto source = std::make_shared<HangingSource>();
  {
    DataLoader loader(make_feed(source), shape(4));
    EXPECT_FALSE(loader.wait(std::chrono::milliseconds(20)));
    loader.abandon_reading();
  }
  source->let_go();
}

}  // namespace
}  // namespace titan::data
