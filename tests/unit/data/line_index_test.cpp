#include "data/sources/files.h"

#include <gtest/gtest.h>

#include "temporary_folder.h"

namespace titan::data {
namespace {

namespace fs = std::filesystem;

class LineIndexTest : public testing::Test {
 protected:
  LineIndexTest() { folder_.write("a.jsonl", "{\"text\": \"one\"}\n{\"text\": \"three\"}\n"); }

  LineIndex build(const std::string& field = "text") {
    return LineIndex({.files = list_files((folder_.path() / "a.jsonl").string(), {}),
                      .text_field = field,
                      .cache_folder = folder_.path() / "cache"});
  }
  fs::path kept() const {
    for (const auto& entry : fs::directory_iterator(folder_.path() / "cache")) return entry.path();
    return {};
  }
  TemporaryFolder folder_;
};

TEST_F(LineIndexTest, IsBuiltOnce) {
  EXPECT_FALSE(build().was_cached());
  LineIndex again = build();
  EXPECT_TRUE(again.was_cached());
  ASSERT_EQ(again.size(), 2);
  EXPECT_EQ(again[1].offset, 16);
  EXPECT_EQ(again[1].line_bytes, 17);
  EXPECT_EQ(again[1].text_bytes, 5);
}

TEST_F(LineIndexTest, IsRebuiltWhenTheFilesChange) {
  build();
  folder_.write("a.jsonl", "{\"text\": \"other\"}\n");
  LineIndex index = build();
  EXPECT_FALSE(index.was_cached());
  EXPECT_EQ(index.size(), 1);
}

TEST_F(LineIndexTest, IsRebuiltWhenDamaged) {
  for (int damage = 0; damage < 3; ++damage) {
    build();
    fs::path file = kept();
    auto size = fs::file_size(file);
    if (damage == 0) fs::resize_file(file, size - 1);
    if (damage == 1) fs::resize_file(file, 10);
    if (damage == 2) {
      std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekp(static_cast<std::streamoff>(size) - 20);
      stream.put('\x55');
    }
    EXPECT_FALSE(build().was_cached()) << damage;
    EXPECT_TRUE(build().was_cached()) << damage;
  }
}

// Another rank has its turn first: this one takes what that has left.
TEST_F(LineIndexTest, IsTakenFromTheRankThatBuiltIt) {
  bool was_built = false;
  LineIndex index({.files = list_files((folder_.path() / "a.jsonl").string(), {}),
                   .text_field = "text",
                   .cache_folder = folder_.path() / "cache",
                   .in_turn = [&](const std::function<void()>& part, std::chrono::seconds limit) {
                     EXPECT_GE(limit.count(), 60);
                     was_built = !build().was_cached();
                     part();
                   }});
  EXPECT_TRUE(was_built);
  EXPECT_TRUE(index.was_cached());
  EXPECT_EQ(index.size(), 2);
}

TEST_F(LineIndexTest, KeepsNothingWithoutAFolder) {
  LineIndex index({.files = list_files((folder_.path() / "a.jsonl").string(), {}),
                   .text_field = "text",
                   .cache_folder = {}});
  EXPECT_EQ(index.size(), 2);
  EXPECT_FALSE(fs::exists(folder_.path() / "cache"));
}

}  // namespace
}  // namespace titan::data
