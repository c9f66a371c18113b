#include "core/file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <thread>
#include <vector>

#include "titan/core/error.h"

namespace titan {
namespace {

namespace fs = std::filesystem;

class FileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "titan_file_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  size_t entries() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator{}));
  }

  fs::path folder_;
};

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// Limits files of this process to `bytes` during its lifetime, which looks like a full disk.
class SizeLimit {
 public:
  explicit SizeLimit(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &before_);
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
    rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~SizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  sighandler_t handler_;
};

TEST_F(FileTest, WritesAndReadsBack) {
  std::string contents("a\0b\n", 4);
  write_file_atomic(folder_ / "x", contents);
  EXPECT_EQ(read_file(folder_ / "x"), contents);
  write_file_atomic(folder_ / "x", "new");
  EXPECT_EQ(read_file(folder_ / "x"), "new");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(FileTest, PiecesOfAnySizeKeepTheirOrder) {
  std::string expected;
  write_file_atomic(folder_ / "x", [&](const AppendBytes& append) {
    for (size_t size : {size_t{0}, size_t{3}, size_t{3} << 20, size_t{7}, size_t{1} << 20, size_t{1}}) {
      std::string piece(size, static_cast<char>('a' + expected.size() % 26));
      append(std::as_bytes(std::span(piece)));
      expected += piece;
    }
  });
  EXPECT_EQ(read_file(folder_ / "x"), expected);
}

TEST_F(FileTest, KeepsTheOldFileIfTheWriterThrows) {
  write_file_atomic(folder_ / "x", "old");
  auto broken = [](const AppendBytes&) { throw std::runtime_error("mid-way"); };
  EXPECT_THROW(write_file_atomic(folder_ / "x", broken), std::runtime_error);
  EXPECT_EQ(read_file(folder_ / "x"), "old");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(FileTest, FullDiskErrorNamesPathReasonAndBytes) {
  write_file_atomic(folder_ / "x", "old");
  std::string message;
  {
    SizeLimit limit(4096);
    message = message_of([&] { write_file_atomic(folder_ / "x", std::string(10000, 'a')); });
  }
  EXPECT_EQ(message, str("cannot write ", (folder_ / "x").string(),
                         ": cannot reserve its space: File too large (EFBIG) after 0 bytes; it needs "
                         "10 kB, but files of this process are limited to 4.1 kB (ulimit -f)"));
  EXPECT_EQ(read_file(folder_ / "x"), "old");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(FileTest, NamesAMissingFolder) {
  fs::path path = folder_ / "none" / "x";
  EXPECT_EQ(message_of([&] { write_file_atomic(path, "a"); }),
            str("cannot write ", path.string(),
                ": cannot create it: No such file or directory (ENOENT) after 0 bytes"));
  EXPECT_EQ(message_of([&] { read_file(path); }),
            str("cannot read ", path.string(), ": No such file or directory (ENOENT)"));
}

TEST_F(FileTest, RefusesToReadAFolder) {
  std::string expected = str("cannot read ", folder_.string(), ": it is a folder, not a file");
  EXPECT_EQ(message_of([&] { read_file(folder_); }), expected);
  EXPECT_EQ(message_of([&] { MappedFile{folder_}; }), expected);
}

TEST_F(FileTest, ReadsFilesThatHideTheirSize) { EXPECT_FALSE(read_file("/proc/self/status").empty()); }

TEST_F(FileTest, KeepsEarlierFilesUnderNumbers) {
  EXPECT_EQ(keep_earlier_file(folder_ / "a.json.gz"), std::nullopt);
  for (const char* kept : {"a.1.json.gz", "a.2.json.gz"}) {
    write_file_atomic(folder_ / "a.json.gz", kept);
    EXPECT_EQ(keep_earlier_file(folder_ / "a.json.gz"), folder_ / kept);
    EXPECT_EQ(read_file(folder_ / kept), kept);
  }
  write_file_atomic(folder_ / "plain", "");
  EXPECT_EQ(keep_earlier_file(folder_ / "plain"), folder_ / "plain.1");
  EXPECT_FALSE(fs::exists(folder_ / "plain"));
}

TEST_F(FileTest, MakesFoldersAndSaysWhichPartFailed) {
  make_folder(folder_ / "a" / "b");
  make_folder(folder_ / "a" / "b");
  EXPECT_TRUE(fs::is_directory(folder_ / "a" / "b"));
  write_file_atomic(folder_ / "file", "");
  fs::path wanted = folder_ / "file" / "c";
  EXPECT_EQ(message_of([&] { make_folder(wanted); }),
            str("cannot make folder ", wanted.string(), ": ", (folder_ / "file").string(),
                ": a file of that name is in the way"));
}

TEST_F(FileTest, ManyThreadsMakeTheSameFolder) {
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([&] {
      if (message_of([&] { make_folder(folder_ / "p" / "q" / "r"); }) != "nothing was thrown") ++failures;
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
}

TEST_F(FileTest, MapsAFileAndMovesTheMapping) {
  write_file_atomic(folder_ / "x", "mapped");
  MappedFile first(folder_ / "x");
  MappedFile second = std::move(first);
  EXPECT_EQ(second.text(), "mapped");
  EXPECT_TRUE(first.bytes().empty());
  first = std::move(second);
  EXPECT_EQ(first.text(), "mapped");
}

TEST_F(FileTest, MapsAnEmptyFile) {
  write_file_atomic(folder_ / "x", "");
  EXPECT_TRUE(MappedFile(folder_ / "x").bytes().empty());
}

}  // namespace
}  // namespace titan
