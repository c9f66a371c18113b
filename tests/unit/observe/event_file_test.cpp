#include "observe/metrics_format.h"

#include <gtest/gtest.h>

#include <cstring>

#include "core/file.h"
#include "core/hash.h"
#include "titan/core/error.h"

namespace titan::train {
namespace {

uint32_t unmask(uint32_t masked) {
  uint32_t rotated = masked - 0xa282ead8u;
  return (rotated >> 17) | (rotated << 15);
}

template <class T>
T read(const std::string& bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

std::vector<std::string> records(const std::string& file) {
  std::vector<std::string> found;
  for (size_t at = 0; at < file.size();) {
    auto length = read<uint64_t>(file, at);
    EXPECT_EQ(unmask(read<uint32_t>(file, at + 8)), crc32c(std::string_view(file).substr(at, 8)));
    found.push_back(file.substr(at + 12, length));
    EXPECT_EQ(unmask(read<uint32_t>(file, at + 12 + length)), crc32c(found.back()));
    at += 16 + length;
  }
  return found;
}

TEST(Crc32c, MatchesKnownValues) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);            // the CRC catalogue's check value
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43u);
}

TEST(EventFileWriter, WritesRecordsWithChecksums) {
  auto folder = std::filesystem::path(::testing::TempDir()) / "event_file_test";
  std::filesystem::remove_all(folder);
  std::filesystem::path path;
  {
    EventFileWriter writer(folder);
    writer.write(300, {{"loss", 0.5}, {"lr", 1e-3}});
    path = writer.path();
  }
  auto found = records(read_file(path));
  ASSERT_EQ(found.size(), 2u);
  EXPECT_NE(found[0].find("brain.Event:2"), std::string::npos);
  // step = 300 as a varint after the tag of field 2.
  EXPECT_NE(found[1].find("\x10\xac\x02"), std::string::npos);
  EXPECT_NE(found[1].find("loss"), std::string::npos);
  EXPECT_NE(path.filename().string().find("tfevents"), std::string::npos);
}

TEST(EventFileWriter, NamesAFolderThatCannotBeMade) {
  try {
    EventFileWriter writer("/proc/no_such_folder");
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("/proc/no_such_folder"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace titan::train
