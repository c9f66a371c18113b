#include "data/sources/stored_tokens.h"

#include <gtest/gtest.h>

#include <numeric>

#include "data/feed/feeds.h"
#include "temporary_folder.h"
#include "titan/core/error.h"
#include "titan/data/loader.h"

namespace titan::data {
namespace {

constexpr int64_t kVocab = 50'000;

template <class Id>
std::string bytes_of(const std::vector<Id>& ids) {
  return {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(Id)};
}

template <class Id>
std::vector<Id> numbers(size_t count, Id first = 1) {
  std::vector<Id> ids(count);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

std::string npy(const char* type, const std::string& shape, const std::string& data) {
  std::string header = str("{'descr': '", type, "', 'fortran_order': False, 'shape': ", shape, ", }");
  header.resize(117, ' ');
  header += '\n';
  return std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size()) + '\0' + header + data;
}

std::string llmc(int32_t magic, int32_t version, int32_t num_ids, const std::string& data) {
  std::vector<int32_t> header(256);
  header[0] = magic;
  header[1] = version;
  header[2] = num_ids;
  return bytes_of(header) + data;
}

class StoredTokensTest : public testing::Test {
 protected:
  std::shared_ptr<const Feed> feed(DataSettings settings = {}, bool repeat = true) {
    return build_feed({.dataset = "tokens",
                       .source = {.path = folder_.path().string(), .settings = settings, .cache_folder = {}},
                       .tokenizer = nullptr,
                       .model_vocab_size = kVocab,
                       .repeat = repeat});
  }
  // All tokens, in the order of the files.
  std::vector<int64_t> all(DataSettings settings = {}) {
    settings.shuffle = false;
    std::vector<int64_t> input(1), labels(1), tokens;
    const auto packed = feed(settings, false);
    const auto lane = packed->open(packed->start(0, 1), 1);
    while (lane->fill({input, labels}) > 0) tokens.insert(tokens.end(), {input[0], labels[0]});
    return tokens;
  }
  std::string refusal(const std::string& contents, const char* name = "a.bin", DataSettings settings = {}) {
    const auto path = folder_.write(name, contents);
    const std::string message = message_of<ConfigError>([&] { feed(settings); });
    EXPECT_NE(message.find(path.string()), message.npos) << message;
    std::filesystem::remove(path);
    return message;
  }
  TemporaryFolder folder_;
};

using Tokens = std::vector<int64_t>;

TEST_F(StoredTokensTest, ReadsEveryForm) {
  const auto check = [&](const char* name, const std::string& contents, DataSettings settings = {}) {
    const auto path = folder_.write(name, contents);
    EXPECT_EQ(all(settings), (Tokens{7, 40'000, 0, 49'999})) << name << contents.size();
    std::filesystem::remove(path);
  };
  const std::string narrow = bytes_of<uint16_t>({7, 40'000, 0, 49'999}),
                    wide = bytes_of<uint32_t>({7, 40'000, 0, 49'999});
  check("a.bin", narrow);
  check("a.bin", wide, {.token_type = "uint32"});
  check("a.bin", llmc(20240520, 1, 4, narrow));
  check("a.bin", llmc(20240801, 7, 4, wide));
  check("a.npy", npy("<u2", "(4,)", narrow));
  check("a.npy", npy("<u4", "(4,)", wide));
  check("a.npy", npy("<i4", "(4,)", wide));
}

TEST_F(StoredTokensTest, FilesOfSeveralFormsAreOneDataSet) {
  folder_.write("a.bin", bytes_of<uint16_t>({1, 2, 3}));
  folder_.write("b.npy", npy("<u4", "(2,)", bytes_of<uint32_t>({4, 5})));
  folder_.write("c.bin", llmc(20240520, 1, 1, bytes_of<uint16_t>({6})));
  EXPECT_EQ(all(), (Tokens{1, 2, 3, 4, 5, 6}));
}

TEST_F(StoredTokensTest, ReadsLongRowsBlockByBlock) {
  folder_.write("a.bin", bytes_of(numbers<uint16_t>(40'000)));
  const auto tokens = all({.piece_bytes = 100'000});
  EXPECT_EQ(tokens, numbers<int64_t>(40'000));
}

TEST_F(StoredTokensTest, RefusesOtherSizesAndForms) {
  const std::string ids = bytes_of(numbers<uint16_t>(100));
  EXPECT_NE(refusal("").find("is empty"), std::string::npos);
  EXPECT_NE(refusal(ids + "x").find("not a whole number of uint16"), std::string::npos);
  EXPECT_NE(refusal(ids + "xy", "a.bin", {.token_type = "uint32"}).find("not a whole number of uint32"),
            std::string::npos);
  EXPECT_NE(refusal(llmc(20240520, 1, 101, ids)).find("announces 101 token ids"), std::string::npos);
  EXPECT_NE(refusal(llmc(20240520, 1, -1, ids)).find("announces -1"), std::string::npos);
  EXPECT_NE(refusal(llmc(20240520, 1, 0, "")), "");
  EXPECT_NE(refusal(llmc(20240520, 1, 0, "").substr(0, 500)), "");
  EXPECT_NE(refusal(llmc(20240520, 2, 100, ids)).find("has version 2, expected 1"), std::string::npos);
  EXPECT_NE(refusal(npy("<u2", "(99,)", ids), "a.npy").find("does not fit"), std::string::npos);
  EXPECT_NE(refusal(npy("<u2", "(0,)", ""), "a.npy").find("no token ids"), std::string::npos);
  EXPECT_NE(refusal(npy("<i8", "(25,)", ids), "a.npy").find("its type is <i8"), std::string::npos);
  EXPECT_NE(refusal(npy("<u2", "(10, 10)", ids), "a.npy").find("2 dimensions"), std::string::npos);
  EXPECT_NE(refusal("no array", "a.npy").find("magic bytes"), std::string::npos);
  // Ids of 32 bits without a header, read as 16.
  EXPECT_NE(refusal(bytes_of(numbers<uint32_t>(100))).find("data.token_type = \"uint32\""),
            std::string::npos);
}

TEST_F(StoredTokensTest, NamesThePositionOfAnIdOutsideTheVocabulary) {
  auto ids = numbers<uint16_t>(10'000);
  ids[9'990] = 50'000;  // among the samples
  const std::string message = refusal(bytes_of(ids));
  EXPECT_NE(message.find("token 9990 of 10000 (from 0) is 50000, outside of the model's vocabulary of 50000"),
            message.npos)
      << message;
  std::swap(ids[9'990], ids[2'000]);  // not among them: found when it is read
  folder_.write("a.bin", bytes_of(ids));
  EXPECT_NE(message_of<ConfigError>([&] { all(); }).find("token 2000 of 10000"), message.npos);
}

// Any ranks, any point: the loader's state is that of other sources.
TEST_F(StoredTokensTest, ShufflesAndResumes) {
  folder_.write("a.bin", bytes_of(numbers<uint16_t>(30'001)));
  folder_.write("b.bin", bytes_of(numbers<uint16_t>(9'999, 30'002)));
  // 250 bytes: 62 ids, so that pieces and samples end in different places.
  const DataSettings settings{.piece_bytes = 250, .seed = 3};
  const auto loader = [&](int64_t rank, int64_t ranks) {
    return DataLoader(feed(settings), {.dp_rank = rank,
                                       .dp_size = ranks,
                                       .global_batch_size = 6,
                                       .local_batch_size = 6 / ranks,
                                       .seq_len = 50});
  };
  DataLoader whole = loader(0, 1);
  std::vector<Batch> expected;
  std::multiset<int64_t> seen;
  for (int step = 0; step < 40; ++step) expected.push_back(whole.next_step()->front());
  for (const Batch& batch : expected)
    for (int64_t i = 0; i < batch.input_BS.numel(); ++i) seen.insert(batch.input_BS.data_ptr<int64_t>()[i]);
  EXPECT_EQ(std::set<int64_t>(seen.begin(), seen.end()).size(), seen.size()) << "an id is repeated";
  EXPECT_GT(*seen.rbegin() - *seen.begin(), 30'000) << "the pieces aren't shuffled";

  DataLoader first = loader(0, 1);
  for (int step = 0; step < 17; ++step) first.next_step();
  const LoaderState state = loader_state_from_json(to_json(first.state()));
  for (const int64_t ranks : {1, 2, 3}) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      DataLoader resumed = loader(rank, ranks);
      resumed.load_state(state);
      for (size_t step = 17; step < expected.size(); ++step) {
        const Batch batch = resumed.next_step()->front();
        for (int64_t row = 0; row < 6 / ranks; ++row)
          ASSERT_TRUE(batch.labels_BS[row].equal(expected[step].labels_BS[rank + row * ranks]))
              << "step " << step;
      }
    }
  }
  // Other ids of the same number are other data.
  folder_.write("b.bin", bytes_of(numbers<uint16_t>(9'999, 30'003)));
  EXPECT_NE(message_of<Error>([&] { loader(0, 1).load_state(state); }).find("the data have changed"),
            std::string::npos);
}

}  // namespace
}  // namespace titan::data
