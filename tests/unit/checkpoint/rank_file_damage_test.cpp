// Files that were changed after writing: none of their values is used, and the message names the problem.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

#include "checkpoint/format/rank_file.h"
#include "checkpoint/format/safetensors_header.h"
#include "unit/checkpoint/rank_file_support.h"

namespace titan::checkpoint {
namespace {

using namespace testing;
using titan::testing::TempFolder;

std::vector<PieceToWrite> some_pieces() {
  return {{"a.wide", box_at({8, 0}, {50, 100}), sample(at::kDouble, {50, 100})},
          piece("b.large", sample(at::kFloat, {600, 500})),
          piece("c.half", sample(at::kBFloat16, {1000})),
          piece("d.bytes", sample(at::kByte, {77}))};
}

#define EXPECT_SAYS(message, words) \
  EXPECT_NE((message).find(words), std::string::npos) << "'" << (message) << "'"

class DamagedRankFile : public ::testing::Test {
 protected:
  DamagedRankFile() : written_(write_rank_file(path_, kIdentity, pieces_)), bytes_(read_raw(path_)) {
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
  }
  ~DamagedRankFile() override { ::close(fd_); }

  RankFile open(const FileIdentity& identity = kIdentity) const { return {path_, identity, written_.record}; }

  void put(size_t position, char byte) const {
    ASSERT_EQ(::pwrite(fd_, &byte, 1, static_cast<off_t>(position)), 1);
  }
  // Calls `call` while one bit of the file is flipped.
  template <class Call>
  void with_flipped(size_t bit, const Call& call) const {
    put(bit / 8, static_cast<char>(bytes_[bit / 8] ^ (1 << (bit % 8))));
    call();
    put(bit / 8, bytes_[bit / 8]);
  }
  std::string name_at(size_t position) const {
    const RankFile file = open();
    for (const std::string& name : file.names()) {
      const auto& entry = file.entry(name);
      const auto begin = static_cast<size_t>(entry.offset);
      if (position >= begin && position < begin + static_cast<size_t>(entry.num_bytes)) return name;
    }
    return "no tensor";
  }

  TempFolder folder_;
  std::filesystem::path path_ = folder_ / "rank_00003.safetensors";
  std::vector<PieceToWrite> pieces_ = some_pieces();
  WrittenFile written_;
  std::string bytes_;
  int fd_ = -1;
};

TEST_F(DamagedRankFile, DetectsEveryFlippedBitOfTheHeader) {
  for (size_t bit = 0; bit < 8 * header_size(bytes_); ++bit) {
    std::string message;
    with_flipped(bit, [&] { message = complaint([&] { open(); }); });
    ASSERT_NE(message.find(path_.string()), std::string::npos) << "bit " << bit << ": '" << message << "'";
  }
  open().verify();
}

TEST_F(DamagedRankFile, DetectsFlippedBitsOfTensors) {
  std::mt19937_64 random(11);
  const size_t first = 8 * header_size(bytes_), bits = 8 * bytes_.size() - first;
  for (int trial = 0; trial < 1000; ++trial) {
    const size_t bit = first + random() % bits;
    const std::string name = name_at(bit / 8);
    std::string of_read, of_verify;
    with_flipped(bit, [&] {
      const RankFile file = open();
      of_read = complaint([&] { read_whole(file, name); });
      of_verify = complaint([&] { file.verify(); });
    });
    for (const std::string& message : {of_read, of_verify}) {
      ASSERT_NE(message.find(path_.string()), std::string::npos) << "bit " << bit << ": '" << message << "'";
      ASSERT_NE(message.find("'" + name + "' is damaged"), std::string::npos)
          << bit << ": '" << message << "'";
    }
  }
}

TEST_F(DamagedRankFile, RefusesOnlyTheDamagedTensor) {
  const size_t position = static_cast<size_t>(open().entry("c.half").offset);
  with_flipped(8 * position, [&] {
    const RankFile file = open();
    for (const PieceToWrite& expected : pieces_) {
      if (expected.name == "c.half") continue;
      EXPECT_TRUE(same_bits(read_whole(file, expected.name), expected.data)) << expected.name;
    }
    EXPECT_NE(complaint([&] { read_whole(file, "c.half"); }), "");
  });
}

TEST_F(DamagedRankFile, VerifyNamesEveryDamagedTensorOnce) {
  for (const char* name : {"b.large", "d.bytes"}) {
    const auto& entry = open().entry(name);
    const auto first = static_cast<size_t>(entry.offset),
               last = first + static_cast<size_t>(entry.num_bytes) - 1;
    for (size_t position : {first, last}) put(position, static_cast<char>(bytes_[position] ^ 1));
  }
  const std::string message = complaint([&] { open().verify(); });
  EXPECT_SAYS(message, "'b.large' is damaged: block 0 of 2");
  EXPECT_SAYS(message, "'d.bytes' is damaged: block 0 of 1");
  EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 1) << message;
}

// A part is refused only if its own blocks are damaged, and damaged bytes don't reach the target.
TEST_F(DamagedRankFile, RefusesOnlyDamagedPartsOfATensor) {
  const size_t second_block = static_cast<size_t>(open().entry("b.large").offset + kBlockBytes);
  with_flipped(8 * second_block, [&] {
    const RankFile file = open();
    at::Tensor first_rows = at::zeros({10, 500}), last_columns = at::zeros({100, 3});
    file.read("b.large", box_at({0, 0}, {10, 500}), first_rows);
    EXPECT_TRUE(same_bits(first_rows, pieces_[1].data.narrow(0, 0, 10).contiguous()));
    EXPECT_NE(complaint([&] { file.read("b.large", box_at({500, 497}, {100, 3}), last_columns); }), "");
    EXPECT_TRUE(same_bits(last_columns, at::zeros({100, 3})));
  });
}

TEST_F(DamagedRankFile, RefusesTruncatedAndExtendedFiles) {
  const size_t header = header_size(bytes_);
  for (size_t size : {size_t{0}, size_t{1}, size_t{7}, size_t{8}, header - 1, header, header + 1,
                      bytes_.size() - 1, bytes_.size() + 1}) {
    std::string changed = bytes_;
    changed.resize(size, '\0');
    write_raw(path_, changed);
    const std::string message = complaint([&] { open(); });
    EXPECT_SAYS(message, path_.string());
    EXPECT_SAYS(message, str("has ", size, " bytes; the checkpoint's manifest says ", bytes_.size()));
    // The same with a manifest that records this size.
    FileRecord record{static_cast<int64_t>(size), digest_of(changed.substr(0, header))};
    EXPECT_SAYS(complaint([&] { RankFile(path_, kIdentity, record); }), path_.string());
  }
}

TEST_F(DamagedRankFile, IdentifiesSwappedFiles) {
  const auto of_other = [&](FileIdentity other) {
    const WrittenFile written = write_rank_file(path_, other, pieces_);
    // First with the manifest's record of the right file, then with a record of the wrong one.
    const std::string first = complaint([&] { open(); });
    const std::string second = complaint([&] { RankFile(path_, kIdentity, written.record); });
    EXPECT_SAYS(first, path_.string());
    EXPECT_SAYS(second, path_.string());
    return std::pair(first, second);
  };
  FileIdentity other = kIdentity;
  other.step = 400;
  auto messages = of_other(other);
  EXPECT_SAYS(messages.first, "it belongs to step 400, not 500");
  EXPECT_SAYS(messages.second, "it belongs to step 400, not 500");
  other = kIdentity;
  other.step = 12345678;  // makes the file's size differ too
  messages = of_other(other);
  EXPECT_SAYS(messages.first, "it belongs to step 12345678, not 500");
  other = kIdentity;
  other.rank = 4;
  messages = of_other(other);
  EXPECT_SAYS(messages.first, "it belongs to rank 4, not 3");
  EXPECT_SAYS(messages.second, "it belongs to rank 4, not 3");
  other = kIdentity;
  other.run_id[0] = 'f';
  messages = of_other(other);
  EXPECT_SAYS(messages.first, "it belongs to run 'f123");
  EXPECT_SAYS(messages.second, "it belongs to run 'f123");
  other = kIdentity;
  other.world_size = 9;
  EXPECT_SAYS(of_other(other).second, "it was saved by 9 ranks, not by 8");
}

TEST_F(DamagedRankFile, RefusesAFileOfTheSameRankWithOtherTensors) {
  pieces_[3].data = sample(at::kByte, {77});
  write_rank_file(path_, kIdentity, pieces_);
  EXPECT_SAYS(complaint([&] { open(); }), "digest");
}

TEST_F(DamagedRankFile, ReportsFilesThatChangeWhileOpen) {
  const RankFile file = open();
  ASSERT_EQ(::ftruncate(fd_, static_cast<off_t>(bytes_.size() - 1)), 0);
  EXPECT_SAYS(complaint([&] { read_whole(file, "d.bytes"); }), "when it was opened");
  EXPECT_SAYS(complaint([&] { file.verify(); }), "when it was opened");
  ASSERT_EQ(::ftruncate(fd_, 0), 0);
  EXPECT_SAYS(complaint([&] { read_whole(file, "a.wide"); }), path_.string());
  write_raw(path_, bytes_ + "x");
  EXPECT_SAYS(complaint([&] { read_whole(file, "a.wide"); }), "when it was opened");
  EXPECT_SAYS(complaint([&] { file.verify(); }), "when it was opened");
}

TEST_F(DamagedRankFile, RefusesNonFiles) {
  EXPECT_SAYS(complaint([&] { RankFile(folder_ / "none", kIdentity, written_.record); }), "ENOENT");
  EXPECT_SAYS(complaint([&] { RankFile(folder_.path(), kIdentity, written_.record); }), "not a regular file");
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_SAYS(complaint([&] { RankFile(folder_ / "pipe", kIdentity, written_.record); }),
              "not a regular file");
}

// ---- made-up headers, with a matching manifest

class MadeUpHeader : public ::testing::Test {
 protected:
  // The complaint about a file of one F32 [2, 3] tensor "w" with this metadata.
  std::string complaint_of(const SafetensorsMetadata& metadata) const {
    const std::string header = titan::detail::make_safetensors_header({{"w", at::kFloat, {2, 3}}}, metadata);
    write_raw(path_, header + std::string(24, 'x'));
    const FileRecord record{static_cast<int64_t>(header.size() + 24), digest_of(header)};
    return complaint([&] { RankFile(path_, kIdentity, record); });
  }
  SafetensorsMetadata with(const std::string& key, const std::string& value) const {
    SafetensorsMetadata metadata = good_;
    metadata[key] = value;
    return metadata;
  }
  SafetensorsMetadata without(const std::string& key) const {
    SafetensorsMetadata metadata = good_;
    metadata.erase(key);
    return metadata;
  }

  TempFolder folder_;
  std::filesystem::path path_ = folder_ / "f.safetensors";
  const SafetensorsMetadata good_ = {{"format", "titan rank file 1"},
                                     {"run_id", kIdentity.run_id},
                                     {"step", "500"},
                                     {"rank", "3"},
                                     {"world_size", "8"},
                                     {"w", "5:7,0:3 xxh3:0123456789abcdef"}};
};

TEST_F(MadeUpHeader, AcceptsAGoodHeader) { EXPECT_EQ(complaint_of(good_), ""); }

TEST_F(MadeUpHeader, RefusesMissingAndUnknownKeys) {
  for (const auto& [key, value] : good_) EXPECT_SAYS(complaint_of(without(key)), "no '" + key + "'");
  EXPECT_SAYS(complaint_of({}), "not a rank's file");
  EXPECT_SAYS(complaint_of(with("v", "0:1 xxh3:")), "'v' belongs to no tensor");
  EXPECT_SAYS(complaint_of(with("format", "titan rank file 2")), "this program reads 'titan rank file 1'");
}

TEST_F(MadeUpHeader, RefusesBadNumbers) {
  for (const char* text : {"", "-1", "+1", " 1", "1 ", "1.0", "0x1", "9223372036854775808"})
    for (const char* key : {"step", "rank", "world_size"})
      EXPECT_SAYS(complaint_of(with(key, text)), str("metadata '", key, "' is '", text, "'"));
}

TEST_F(MadeUpHeader, RefusesBadBoxes) {
  for (const char* box : {"", " ", "5:7", "5:7 ", "5:7,0:3,0:1 ", "5:7,0:4 ", "7:5,0:3 ", "-2:0,0:3 ",
                          "5:7,0:3", "5:7,0:3,  ", ",5:7,0:3 ", "5:7,,0:3 ", "5-7,0:3 ", "5:,0:3 ", ":2,0:3 ",
                          "9223372036854775807:9223372036854775809,0:3 ", "5:7 0:3 "})
    EXPECT_SAYS(complaint_of(with("w", std::string(box) + "xxh3:0123456789abcdef")), "tensor 'w': ");
  // The largest possible offset.
  EXPECT_EQ(complaint_of(with("w", "9223372036854775805:9223372036854775807,0:3 xxh3:0123456789abcdef")), "");
}

TEST_F(MadeUpHeader, RefusesBadChecksums) {
  for (const char* checksums :
       {"", "xxh3", "xxh3:", "xxh3:0123456789abcde", "xxh3:0123456789abcdef0", "xxh3:0123456789abcdeg",
        "xxh3:0123456789ABCDEF", "xxh3:0123456789abcdef,", "xxh3:0123456789abcdef,0123456789abcdef",
        "xxh3:-123456789abcdef", "crc:0123456789abcdef"})
    EXPECT_SAYS(complaint_of(with("w", std::string("5:7,0:3 ") + checksums)), "tensor 'w': ");
}

// For any changed header, the parser throws Error or returns valid entries.
TEST_F(MadeUpHeader, ParsesAnyChangedByteWithoutHarm) {
  std::mt19937_64 random(3);
  const std::string good = titan::detail::make_safetensors_header({{"w", at::kFloat, {2, 3}}}, good_);
  int taken = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::string text = good.substr(8);
    for (uint64_t change = random() % 3 + 1; change > 0; --change)
      text[random() % text.size()] = static_cast<char>(random() % 128);
    try {
      const auto header = detail::parse_rank_file_header(text, good.size(), good.size() + 24, "f");
      for (const auto& [name, entry] : header.entries) {
        EXPECT_LE(entry.offset + entry.num_bytes, static_cast<int64_t>(good.size() + 24));
        EXPECT_EQ(entry.box.numel() * static_cast<int64_t>(c10::elementSize(entry.dtype)), entry.num_bytes);
        for (size_t dim = 0; dim < entry.box.offset.size(); ++dim) EXPECT_GE(entry.box.offset[dim], 0);
      }
      ++taken;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(taken, 0);      // changed digits of a checksum are accepted
  EXPECT_LT(taken, 20000);  // and others refused
}

}  // namespace
}  // namespace titan::checkpoint
