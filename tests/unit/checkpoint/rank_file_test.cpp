// Writing and reading whole files.

#include "checkpoint/format/rank_file.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include <gtest/gtest.h>

#include "titan/checkpoint/safetensors.h"
#include "unit/checkpoint/rank_file_support.h"

namespace titan::checkpoint {
namespace {

using namespace testing;
using titan::testing::TempFolder;

// Every dtype, a scalar, empty tensors, boxes within their tensors, a tensor of several chunks, one that ends
// a byte after a block, and many small ones.
std::vector<PieceToWrite> all_kinds() {
  std::vector<PieceToWrite> pieces;
  pieces.push_back({"0 wide", box_at({7, 100}, {3, 5}), sample(at::kDouble, {3, 5})});
  for (auto dtype : kAllDtypes)
    pieces.push_back(piece(str("t.", c10::toString(dtype)), sample(dtype, {3, 5})));
  pieces.push_back(piece("bytes", sample(at::kByte, {kBlockBytes + 1})));
  pieces.push_back({"empty", box_at({5, 0}, {0, 4}), at::empty({0, 4})});
  pieces.push_back(piece("large", sample(at::kFloat, {2600, 1031})));
  pieces.push_back(piece("scalar", at::scalar_tensor(2.5)));
  for (int i = 0; i < 2000; ++i)
    pieces.push_back(piece(str("small.", i), sample(at::kBFloat16, {1 + i % 7})));
  std::stable_sort(pieces.begin(), pieces.end(), [](const PieceToWrite& a, const PieceToWrite& b) {
    return a.data.element_size() > b.data.element_size();
  });
  return pieces;
}

TEST(RankFile, RoundTripsEverythingBitForBit) {
  const TempFolder folder;
  const auto pieces = all_kinds();
  const WrittenFile written = write_rank_file(folder / "a.safetensors", kIdentity, pieces);
  EXPECT_EQ(written.record.num_bytes, rank_file_bytes(kIdentity, pieces));
  EXPECT_EQ(written.record.num_bytes,
            static_cast<int64_t>(std::filesystem::file_size(folder / "a.safetensors")));
  EXPECT_TRUE(written.finite);

  const RankFile file(folder / "a.safetensors", kIdentity, written.record);
  ASSERT_EQ(file.names().size(), pieces.size());
  for (const PieceToWrite& expected : pieces) {
    EXPECT_TRUE(same_bits(read_whole(file, expected.name), expected.data)) << expected.name;
    EXPECT_EQ(file.entry(expected.name).box, expected.box) << expected.name;
    EXPECT_EQ(file.entry(expected.name).offset % static_cast<int64_t>(expected.data.element_size()), 0);
  }
  EXPECT_EQ(file.file().bytes_read(), written.record.num_bytes);
  EXPECT_NE(complaint([&] { file.entry("nothing"); }).find("nothing"), std::string::npos);
}

TEST(RankFile, VerifyReadsEveryByteOfTheTensors) {
  const TempFolder folder;
  const auto pieces = all_kinds();
  const WrittenFile written = write_rank_file(folder / "a.safetensors", kIdentity, pieces);
  const RankFile file(folder / "a.safetensors", kIdentity, written.record);
  const int64_t header_bytes = file.file().bytes_read();
  int64_t told = 0;
  file.verify([&](int64_t bytes) { told += bytes; });
  EXPECT_EQ(header_bytes + told, written.record.num_bytes);
  EXPECT_EQ(file.file().bytes_read(), written.record.num_bytes);
}

TEST(RankFile, IsWellFormedSafetensors) {
  const TempFolder folder;
  const auto pieces = all_kinds();
  write_rank_file(folder / "a.safetensors", kIdentity, pieces);
  const SafetensorsFile file(folder / "a.safetensors");
  for (const PieceToWrite& expected : pieces)
    EXPECT_TRUE(same_bits(file.tensor(expected.name), expected.data)) << expected.name;
  EXPECT_EQ(file.metadata().at("format"), "titan rank file 1");
  EXPECT_EQ(file.metadata().at("step"), "500");
  EXPECT_TRUE(file.metadata().at("0 wide").starts_with("7:10,100:105 xxh3:"));
  EXPECT_TRUE(file.metadata().at("scalar").starts_with("xxh3:"));
  EXPECT_EQ(file.metadata().at("empty"), "5:5,0:4 xxh3:");
}

TEST(RankFile, RoundTripsAFileWithoutTensors) {
  const TempFolder folder;
  const WrittenFile written = write_rank_file(folder / "a.safetensors", kIdentity, {});
  const RankFile file(folder / "a.safetensors", kIdentity, written.record);
  EXPECT_TRUE(file.names().empty());
  file.verify();
}

std::string output_of(const std::string& command) {
  std::string output;
  FILE* pipe = ::popen(command.c_str(), "r");
  std::array<char, 4096> buffer;
  while (const size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe))
    output.append(buffer.data(), count);
  ::pclose(pipe);
  return output;
}

std::string hex_of(const at::Tensor& tensor) {
  std::string text;
  const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  for (size_t i = 0; i < tensor.nbytes(); ++i) {
    text += "0123456789abcdef"[bytes[i] >> 4];
    text += "0123456789abcdef"[bytes[i] & 15];
  }
  return text;
}

TEST(RankFile, IsReadableByPythonsSafetensors) {
  const std::string python = std::string(TITAN_SOURCE_DIR) + "/.venv/bin/python";
  if (output_of(python + " -c 'import safetensors; print(1)' 2>/dev/null") != "1\n")
    GTEST_SKIP() << python << " has no safetensors";
  const TempFolder folder;
  std::vector<PieceToWrite> pieces;
  for (auto dtype : kAllDtypes)
    pieces.push_back(piece(str("t.", c10::toString(dtype)), sample(dtype, {3, 5})));
  pieces.push_back({"z empty", box_at({5, 0}, {0, 4}), at::empty({0, 4}, at::kBool)});
  write_rank_file(folder / "a.safetensors", kIdentity, pieces);

  write_raw(folder / "read.py",
            "import safetensors, sys\n"
            "for name, t in safetensors.deserialize(open(sys.argv[1], 'rb').read()):\n"
            "  print(name, list(t['shape']), bytes(t['data']).hex(), sep='|')\n");
  std::map<std::string, std::string> found;
  std::istringstream lines(
      output_of(python + " " + (folder / "read.py").string() + " " + (folder / "a.safetensors").string()));
  for (std::string line; std::getline(lines, line);) found[line.substr(0, line.find('|'))] = line;
  ASSERT_EQ(found.size(), pieces.size());
  for (const PieceToWrite& expected : pieces) {
    const std::string shape = expected.name == "z empty" ? "[0, 4]" : "[3, 5]";
    EXPECT_EQ(found[expected.name], expected.name + "|" + shape + "|" + hex_of(expected.data));
  }
}

TEST(RankFile, WritesTheSameBytesWithAnyNumberOfThreads) {
  const TempFolder folder;
  const auto pieces = all_kinds();
  const WrittenFile one = write_rank_file(folder / "1", kIdentity, pieces, {.num_threads = 1});
  const std::string expected = read_raw(folder / "1");
  for (int threads : {2, 4, 64}) {
    std::mutex mutex;
    int64_t told = 0;
    const WrittenFile other = write_rank_file(folder / "n", kIdentity, pieces,
                                              {.num_threads = threads, .progress = [&](int64_t bytes) {
                                                 std::lock_guard lock(mutex);
                                                 told += bytes;
                                               }});
    EXPECT_EQ(other.record, one.record) << threads;
    EXPECT_TRUE(read_raw(folder / "n") == expected) << threads;
    EXPECT_EQ(told, static_cast<int64_t>(expected.size() - header_size(expected)));
  }
}

TEST(RankFile, ChunksHoldManySmallTensorsOrAPartOfALargeOne) {
  std::vector<PieceToWrite> pieces;
  for (int i = 0; i < 100; ++i) pieces.push_back(piece(str(i), at::empty({1000}, at::kByte)));
  pieces.push_back(piece("large", at::empty({20 * kBlockBytes + 5}, at::kByte)));
  const auto chunks = detail::plan_chunks(pieces);
  EXPECT_EQ(chunks.size(), 3u);
  EXPECT_EQ(chunks[0].segments.size(), 101u);
  int64_t offset = 0;
  for (const detail::Chunk& chunk : chunks) {
    EXPECT_EQ(chunk.offset, offset);
    EXPECT_LE(chunk.num_bytes, detail::kChunkBytes);
    for (const detail::Segment& segment : chunk.segments) {
      EXPECT_EQ(segment.begin % kBlockBytes, 0);
      offset += segment.num_bytes;
    }
  }
  EXPECT_EQ(offset, 100 * 1000 + 20 * kBlockBytes + 5);
}

TEST(RankFile, ReportsWhetherAllElementsAreFinite) {
  const TempFolder folder;
  at::Tensor large = at::zeros({5'000'000});
  for (int64_t position : {int64_t{0}, int64_t{262'144}, int64_t{4'999'999}}) {
    at::Tensor spoiled = large.clone();
    spoiled[position] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<PieceToWrite> pieces = {piece("a", large), piece("b", spoiled)};
    EXPECT_FALSE(write_rank_file(folder / "f", kIdentity, pieces, {.num_threads = 2}).finite) << position;
  }
  EXPECT_TRUE(write_rank_file(folder / "f", kIdentity, std::vector{piece("a", large)}).finite);
}

TEST(RankFile, RefusesInvalidPieces) {
  const TempFolder folder;
  const auto refused = [&](const std::vector<PieceToWrite>& pieces, const std::string& words) {
    const std::string message = complaint([&] { write_rank_file(folder / "f", kIdentity, pieces); });
    EXPECT_NE(message.find(words), std::string::npos) << "'" << message << "'";
    EXPECT_FALSE(std::filesystem::exists(folder / "f"));
  };
  const at::Tensor data = at::zeros({2, 3});
  refused({{"a", box_at({0, 0}, {3, 2}), data}}, "lengths [3, 2]");
  refused({{"a", box_at({0}, {2, 3}), data}}, "'a'");
  refused({{"a", box_at({0, -1}, {2, 3}), data}}, "[0, -1]");
  refused({{"a", box_at({0, std::numeric_limits<int64_t>::max()}, {2, 3}), data}}, "no tensor has a box");
  refused({piece("a", data.t())}, "contiguous");
  refused({piece("step", data)}, "'step'");
  refused({piece("__metadata__", data)}, "__metadata__");
  refused({piece("a", data), piece("a", data)}, "given twice");
  refused({piece("a", data), piece("b", at::zeros({2}, at::kDouble))}, "larger elements");
  refused({piece("a", at::zeros({2}, at::kComplexFloat))}, "dtype");
  refused({{"a", {}, at::Tensor()}}, "undefined");
  EXPECT_NE(
      complaint([&] { write_rank_file(folder / "f", kIdentity, {}, {.num_threads = 0}); }).find("thread"),
      std::string::npos);
}

TEST(RankFile, RefusesTargetsThatDoNotFit) {
  const TempFolder folder;
  const auto written = write_rank_file(folder / "f", kIdentity, std::vector{piece("a", at::zeros({2, 3}))});
  const RankFile file(folder / "f", kIdentity, written.record);
  const Box box = box_at({0, 0}, {2, 3});
  const auto refused = [&](const Box& target_box, const at::Tensor& target, const std::string& words) {
    const std::string message = complaint([&] { file.read("a", target_box, target); });
    EXPECT_NE(message.find(words), std::string::npos) << "'" << message << "'";
  };
  refused(box, at::zeros({2, 3}, at::kDouble), "Double");
  refused(box, at::zeros({3, 2}), "[3, 2]");
  refused(box_at({0}, {2}), at::zeros({2}), "lengths [2]");
  EXPECT_NE(complaint([&] { file.read("b", box, at::zeros({2, 3})); }).find("'b'"), std::string::npos);
}

TEST(RankFile, SeveralThreadsReadAtOnce) {
  const TempFolder folder;
  const auto pieces = all_kinds();
  const WrittenFile written = write_rank_file(folder / "f", kIdentity, pieces);
  const RankFile file(folder / "f", kIdentity, written.record);
  std::array<bool, 4> equal{};
  {
    std::vector<std::jthread> threads;
    for (bool& result : equal)
      threads.emplace_back([&result, &pieces, file] {
        result = std::all_of(pieces.begin(), pieces.end(), [&](const PieceToWrite& expected) {
          return same_bits(read_whole(file, expected.name), expected.data);
        });
      });
  }
  EXPECT_EQ(equal, (std::array<bool, 4>{true, true, true, true}));
}

}  // namespace
}  // namespace titan::checkpoint
