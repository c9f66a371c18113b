#include "data/feed/feeds.h"

#include <gtest/gtest.h>

#include <limits>

#include "temporary_folder.h"
#include "titan/core/error.h"

namespace titan::data {
namespace {

using Values = std::vector<int32_t>;

std::string npy(const std::string& dictionary, const Values& values, int version = 1) {
  std::string text = "\x93NUMPY";
  text += {static_cast<char>(version), 0};
  for (size_t i = 0, size = dictionary.size() + 1; i < (version == 1 ? 2u : 4u); ++i, size >>= 8)
    text += static_cast<char>(size);
  text += dictionary + "\n";
  return text.append(reinterpret_cast<const char*>(values.data()), values.size() * 4);
}

std::string header(const std::string& shape, const char* descr = "<i4", const char* fortran = "False") {
  return str("{'descr': '", descr, "', 'fortran_order': ", fortran, ", 'shape': ", shape, ", }");
}

class ReplayTest : public testing::Test {
 protected:
  std::string refusal(const std::string& file) {
    return message_of<ConfigError>([&] { NpyArray(folder_.write("x.npy", file)); });
  }
  std::shared_ptr<ReplayFeed> feed(const Values& input, const Values& labels, int64_t vocab_size = 100,
                                   bool finite = false) {
    folder_.write("input.npy", npy(header("(2, 3, 2)"), input));
    folder_.write("labels.npy", npy(header("(2, 3, 2)"), labels));
    return std::make_shared<ReplayFeed>(folder_.path(), vocab_size, finite);
  }
  TemporaryFolder folder_;
  const Values input_{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  const Values labels_{1, 2, 3, -100, -100, -100, 7, 8, 9, 10, 11, 12};
};

TEST_F(ReplayTest, ReadsFilesOfAllVersions) {
  for (int version : {1, 2, 3}) {
    NpyArray array(folder_.write("x.npy", npy(header("(2, 3, 2)"), input_, version)));
    EXPECT_EQ(array.shape(), (std::array<int64_t, 3>{2, 3, 2}));
    std::vector<int64_t> row(2);
    array.read_row(1, 2, row);
    EXPECT_EQ(row, (std::vector<int64_t>{10, 11}));
  }
}

TEST_F(ReplayTest, RefusesOtherFiles) {
  EXPECT_NE(refusal(""), "");
  EXPECT_NE(refusal("\x93NUMPY\x01"), "");
  EXPECT_NE(refusal(std::string("\x93NUMPY\x01\x00\xFF\xFF{}", 12)), "");
  EXPECT_NE(refusal(npy(header("(2, 3, 2)"), input_, 4)).find("version"), std::string::npos);
  EXPECT_NE(refusal(npy(header("(2, 3, 2)", "<i8"), input_)).find("<i8"), std::string::npos);
  EXPECT_NE(refusal(npy(header("(2, 3, 2)", "<i4", "True"), input_)).find("Fortran"), std::string::npos);
  EXPECT_NE(refusal(npy(header("(12,)"), input_)).find("1 dimensions"), std::string::npos);
  EXPECT_NE(refusal(npy(header("(2, 3, 3)"), input_)).find("[2, 3, 3]"), std::string::npos);
  EXPECT_NE(refusal(npy(header("(2, 3, 1)"), input_)), "");
  EXPECT_NE(refusal(npy(header("(2, -3, -2)"), input_)), "");
  EXPECT_NE(refusal(npy(header("(4611686018427387904, 4, 4)"), input_)), "");
  EXPECT_NE(refusal(npy("{'descr': '<i4'}", input_)).find("lacks"), std::string::npos);
  EXPECT_NE(refusal(npy(header("(2, 3, 2)") + "x", input_)), "");
  EXPECT_NE(refusal(npy("{'descr': '<i4', 'extra': 1}", input_)).find("extra"), std::string::npos);
}

TEST_F(ReplayTest, RowsAreLanes) {
  auto replay = feed(input_, labels_);
  std::vector<int64_t> input(2), labels(2);
  auto lane = replay->open(replay->start(1, 3), 3);
  EXPECT_EQ(lane->fill({input, labels}), 1);
  EXPECT_EQ(input, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(labels, (std::vector<int64_t>{3, -100}));
  EXPECT_EQ(lane->fill({input, labels}), 2);
  EXPECT_EQ(input, (std::vector<int64_t>{8, 9}));
  EXPECT_EQ(lane->state(), (LaneState{.lane = 1, .position = 2}));
  EXPECT_NE(message_of<Error>([&] {
              lane->fill({input, labels});
            }).find("training.steps"),
            std::string::npos);
}

// A file that NumPy wrote.
TEST_F(ReplayTest, ReadsARealRecording) {
  auto replay = std::make_shared<ReplayFeed>(TITAN_SOURCE_DIR "/tests/data/parity/mini", 256, false);
  replay->check_shape(4, 64);
  std::vector<int64_t> input(64), labels(64);
  int64_t valid = 0;
  for (int64_t lane = 0; lane < 4; ++lane)
    valid += replay->open(replay->start(lane, 4), 4)->fill({input, labels});
  EXPECT_EQ(valid, 211);
  EXPECT_NE(replay->fingerprint().find("[20, 4, 64]"), std::string::npos);
}

TEST_F(ReplayTest, FiniteRecordingsEnd) {
  auto replay = feed(input_, labels_, 100, true);
  EXPECT_EQ(replay->num_steps(), 2);
  std::vector<int64_t> input(2), labels(2);
  EXPECT_EQ(replay->open({.lane = 0, .position = 2}, 3)->fill({input, labels}), 0);
  EXPECT_EQ(labels, (std::vector<int64_t>{-100, -100}));
}

// Positions come from a checkpoint, which may be untrusted.
TEST_F(ReplayTest, RefusesPositionsOutsideTheRecording) {
  auto replay = feed(input_, labels_, 100, true);
  for (const LaneState& place :
       {LaneState{.lane = -1}, LaneState{.lane = 3}, LaneState{.lane = 0, .position = -1},
        LaneState{.lane = 0, .position = std::numeric_limits<int64_t>::max()},
        LaneState{.lane = 0, .epoch = 1}, LaneState{.lane = 0, .token_offset = 1}})
    EXPECT_NE(message_of<Error>([&] { replay->open(place, 3); }).find("no such position"), std::string::npos);
}

TEST_F(ReplayTest, NamesWhatDoesNotMatchTheRecording) {
  auto replay = feed(input_, labels_);
  EXPECT_NO_THROW(replay->check_shape(3, 2));
  EXPECT_NE(message_of<ConfigError>([&] { replay->check_shape(4, 2); }).find("global_batch_size"),
            std::string::npos);
  EXPECT_THROW(replay->check_shape(3, 3), ConfigError);
  EXPECT_THROW(replay->redeal({}, 4), ConfigError);
  EXPECT_NE(message_of<ConfigError>([&] { ReplayFeed(folder_.path() / "none", 9, false); }).find("input.npy"),
            std::string::npos);

  std::vector<int64_t> row(2), labels(2);
  auto small = feed(input_, labels_, 9);
  auto message = message_of<Error>([&] { small->open({.lane = 1, .position = 1}, 3)->fill({row, labels}); });
  EXPECT_NE(message.find("id 9 at step 2, row 2"), message.npos) << message;
  EXPECT_NE(feed(input_, labels_)->fingerprint(), feed(input_, input_)->fingerprint());
}

}  // namespace
}  // namespace titan::data
