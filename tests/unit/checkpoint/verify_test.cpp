// Random damage of every kind is found, and the report names the file and its contents.

#include "titan/checkpoint/step_folder.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <random>

#include "checkpoint_files.h"
#include "temp_folder.h"
#include "titan/core/error.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace titan::testing;

constexpr int kTrials = 1000;

void replace_bytes(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::vector<std::string> lines(const VerifyReport& report) {
  std::vector<std::string> lines;
  for (const Damage& damage : report.damages) lines.push_back(to_string(damage));
  return lines;
}

int64_t header_bytes(const std::string& file) {
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  return static_cast<int64_t>(sizeof length + length);
}

TEST(Verify, AcceptsAnUndamagedCheckpoint) {
  const TempFolder folder;
  const CheckpointToSave save = small_checkpoint(5);
  const fs::path step = save_checkpoint(folder.path(), save);
  int64_t last = 0, calls = 0, total = 0;
  VerifyOptions options;
  options.num_threads = 3;
  options.progress = [&](int64_t bytes, int64_t all) {
    EXPECT_GT(bytes, last);
    last = bytes;
    total = all;
    ++calls;
  };
  const VerifyReport report = verify_step(step, options);
  EXPECT_THAT(lines(report), ElementsAre());
  EXPECT_EQ(report.num_files, 4);
  EXPECT_EQ(report.num_tensors, static_cast<int64_t>(save.tensors.size()));
  EXPECT_EQ(report.num_bytes, 300 * 1000 * 4 + 7 * 4 + 30 * 2 + 4 + 8);
  EXPECT_EQ(last, report.num_bytes);
  EXPECT_EQ(total, report.num_bytes);
  EXPECT_GT(calls, 4);
}

// The file's pages that are in memory. Asking through a mapping doesn't read any in.
int64_t pages_in_memory(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const size_t num_bytes = fs::file_size(path), page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  void* map = ::mmap(nullptr, num_bytes, PROT_READ, MAP_SHARED, fd, 0);
  ::close(fd);
  EXPECT_NE(map, MAP_FAILED);
  std::vector<unsigned char> pages((num_bytes + page - 1) / page);
  EXPECT_EQ(::mincore(map, num_bytes, pages.data()), 0);
  ::munmap(map, num_bytes);
  return std::ranges::count_if(pages, [](unsigned char flags) { return (flags & 1) != 0; });
}

// Verifying a large checkpoint beside a run must not push the run's own pages out of memory.
TEST(Verify, LeavesNoPageOfTheFilesInMemory) {
  const TempFolder folder;
  struct statfs system = {};
  ASSERT_EQ(::statfs(folder.path().c_str(), &system), 0);
  if (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC)
    GTEST_SKIP() << folder.path() << " is in memory itself";
  CheckpointToSave save{.world_size = 2, .tensors = {}};
  for (int i = 0; i < 20; ++i) {  // units of the page cache that several of them share
    save.tensors.push_back({"t" + std::to_string(i), at::ones({2, kBlockBytes / 4 + 100'000 + i}), {}});
    save.tensors.back().layout = {{cut("dp", 2, 1, 0)}};
  }
  const fs::path step = save_checkpoint(folder.path(), save);
  const auto pages = [&] {
    return pages_in_memory(step / file_name(0)) + pages_in_memory(step / file_name(1));
  };
  ASSERT_GT(pages(), 0) << "none of the pages just written is in memory, so the test proves nothing";
  EXPECT_THAT(lines(verify_step(step)), ElementsAre());
  EXPECT_EQ(pages(), 0);
}

TEST(Verify, ContinuesAfterDamage) {
  const TempFolder folder;
  CheckpointToSave save{.world_size = 2,
                        .tensors = {{"a", at::zeros({3 * kBlockBytes / 4}), {}},
                                    {"b", at::ones({2, 5 * kBlockBytes / 8}), {}}}};
  save.tensors[0].layout = {{cut("dp", 2, 1, 0)}};
  save.tensors[1].layout = {{cut("dp", 2, 1, 0)}};
  const fs::path step = save_checkpoint(folder.path(), save);
  const fs::path file = step / file_name(1);
  const auto size = static_cast<int64_t>(fs::file_size(file));
  const int64_t b = size - 5 * kBlockBytes / 2, a = b - 3 * kBlockBytes / 2;  // where rank 1's pieces begin
  std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
  for (int64_t position : {a + 7, b + kBlockBytes, b + 2 * kBlockBytes + 1}) {
    bytes.seekp(position);
    bytes.put('\x55');
  }
  bytes.close();
  fs::remove(step / file_name(0));
  for (int threads : {1, 4}) {
    VerifyOptions options;
    options.num_threads = threads;
    EXPECT_THAT(
        lines(verify_step(step, options)),
        ElementsAre(
            AllOf(HasSubstr("rank_00000.safetensors: is missing"), HasSubstr("parts of 2 tensors: 'a', 'b'")),
            HasSubstr("rank_00001.safetensors: tensor 'a', block 0: the bytes don't match"),
            HasSubstr("rank_00001.safetensors: tensor 'b', blocks 1 to 2: the bytes don't match")));
  }
}

TEST(Verify, ReportsAMissingFolder) {
  const TempFolder folder;
  EXPECT_THROW(verify_step(folder / "none"), Error);
  EXPECT_THAT(lines(verify_step(folder.path())), ElementsAre(HasSubstr("manifest.json: is missing")));
}

TEST(Verify, ReportsAStepUnderAnotherStepsName) {
  const TempFolder folder;
  fs::rename(save_checkpoint(folder.path(), small_checkpoint(5)), folder / "step-6");
  EXPECT_THAT(lines(verify_step(folder / "step-6")),
              ElementsAre(HasSubstr("manifest.json: belongs to step 5")));
}

// Headers that a writer got wrong: undamaged, but different from the manifest.
TEST(Verify, ComparesHeadersWithTheManifest) {
  const TempFolder folder;
  CheckpointToSave save = small_checkpoint(5);
  const fs::path step = save_checkpoint(folder.path(), save);
  Manifest manifest = read_manifest(step);
  for (WholeTensor& tensor : save.tensors) {
    if (tensor.name == "model.embedding") tensor.layout = {{cut("tp", 2, 1, 0)}};
    if (tensor.name == "model.norm") tensor.name = "model.renamed";
  }
  manifest.table = table_of(save);
  replace_bytes(step / kManifestName, to_text(manifest));
  const std::vector<std::string> found = lines(verify_step(step));
  EXPECT_THAT(found, ::testing::Contains(HasSubstr("tensor 'model.embedding': in the header it covers [0:")));
  EXPECT_THAT(found, ::testing::Contains(HasSubstr("tensor 'model.renamed': is missing from the file")));
  EXPECT_THAT(found, ::testing::Contains(HasSubstr(
                         "tensor 'model.norm': is in the file, but the manifest puts no part of it")));
}

// Two steps of a run and the first of another one. Each trial damages step-1 and repairs it afterwards.
class RandomDamage : public ::testing::Test {
 protected:
  void SetUp() override {
    CheckpointToSave other_run = small_checkpoint(1);
    other_run.run_id = "fedcba9876543210fedcba9876543210";
    save_checkpoint(folder_ / "other", other_run);
    save_checkpoint(folder_.path(), small_checkpoint(2));
    step_ = save_checkpoint(folder_.path(), small_checkpoint(1));
    for (const auto& entry : fs::directory_iterator(step_)) {
      const std::string name = entry.path().filename().string();
      files_[name] = read_file(entry.path());
      names_.push_back(name);
    }
    std::sort(names_.begin(), names_.end());
    ASSERT_EQ(names_.size(), 5u);
    for (int64_t rank = 0; rank < 4; ++rank)
      headers_.emplace_back(step_ / file_name(rank), identity(rank), read_manifest(step_).files[rank]);
  }

  static FileIdentity identity(int64_t rank) { return {small_checkpoint(1).run_id, 1, rank, 4}; }

  size_t below(size_t limit) { return std::uniform_int_distribution<size_t>(0, limit - 1)(random_); }
  std::string any_name() { return names_[below(names_.size())]; }
  std::string any_rank_file() { return file_name(static_cast<int64_t>(below(4))); }
  bool is_manifest(const std::string& name) const { return name == kManifestName; }

  /// The tensor and block of a byte of a rank's file; no tensor for a byte of the header.
  std::pair<std::string, int64_t> place_of(const std::string& name, int64_t position) const {
    const RankFile& file = headers_[static_cast<size_t>(name[9] - '0')];
    for (const std::string& tensor : file.names()) {
      const RankFile::Entry& entry = file.entry(tensor);
      if (position >= entry.offset && position < entry.offset + entry.num_bytes)
        return {tensor, (position - entry.offset) / kBlockBytes};
    }
    return {"", 0};
  }

  // Picks a header half of the time: it is small, and would otherwise be hit once in a thousand trials.
  size_t any_position(const std::string& name) {
    const std::string& bytes = files_[name];
    const bool in_header = !is_manifest(name) && below(2) == 0;
    return below(in_header ? static_cast<size_t>(header_bytes(bytes)) : bytes.size());
  }

  size_t any_length(const std::string& name) {
    const std::string& bytes = files_[name];
    const auto header = is_manifest(name) ? size_t{32} : static_cast<size_t>(header_bytes(bytes));
    const std::vector<size_t> edges = {0, 1, 7, 8, header - 1, header, header + 1, bytes.size() - 1};
    const size_t choice = below(2 * edges.size());
    return choice < edges.size() ? edges[choice] : below(bytes.size());
  }

  // Expects one line, about this file and this tensor's block.
  void expect_found(const std::string& name, const std::string& tensor = "", int64_t block = 0) {
    const VerifyReport report = verify_step(step_);
    ASSERT_EQ(report.damages.size(), 1u) << ::testing::PrintToString(lines(report));
    const Damage& damage = report.damages.front();
    EXPECT_EQ(damage.file, step_ / name);
    EXPECT_EQ(damage.tensor, tensor);
    if (!tensor.empty()) EXPECT_EQ(damage.first_block, block);
    EXPECT_NE(damage.what, "");
    mend(name);
  }

  // Expects a line for each of these files.
  void expect_each_found(const std::vector<std::string>& names) {
    const VerifyReport report = verify_step(step_);
    std::vector<fs::path> expected, found;
    for (const std::string& name : names) expected.push_back(step_ / name);
    for (const Damage& damage : report.damages) found.push_back(damage.file);
    EXPECT_EQ(found, expected) << ::testing::PrintToString(lines(report));
    for (const std::string& name : names) mend(name);
    mend(kManifestName);
  }

  void mend(const std::string& name) {
    fs::remove_all(step_ / name);
    replace_bytes(step_ / name, files_[name]);
  }

  const TempFolder folder_;
  fs::path step_;
  std::map<std::string, std::string> files_;
  std::vector<std::string> names_;
  std::vector<RankFile> headers_;
  std::mt19937_64 random_{20260221};
};

TEST_F(RandomDamage, FindsFlippedBits) {
  int in_tensors = 0, in_headers = 0, in_manifests = 0;
  for (int trial = 0; trial < kTrials / 2; ++trial) {
    const std::string name = any_name();
    const size_t position = any_position(name), bit = below(8);
    std::string damaged = files_[name];
    damaged[position] = static_cast<char>(damaged[position] ^ (1 << bit));
    replace_bytes(step_ / name, damaged);
    SCOPED_TRACE(str("trial ", trial, ": ", name, ", byte ", position, ", bit ", bit));
    const auto [tensor, block] = is_manifest(name) ? std::pair<std::string, int64_t>()
                                                   : place_of(name, static_cast<int64_t>(position));
    expect_found(name, tensor, block);
    ++(is_manifest(name) ? in_manifests : tensor.empty() ? in_headers : in_tensors);
  }
  for (int count : {in_tensors, in_headers, in_manifests}) EXPECT_GT(count, kTrials / 20);
  EXPECT_THAT(lines(verify_step(step_)), ElementsAre());
}

TEST_F(RandomDamage, FindsTruncatedAndExtendedFiles) {
  for (int trial = 0; trial < kTrials / 4; ++trial) {
    const std::string name = any_name();
    const size_t size = files_[name].size();
    const size_t length = below(3) == 0 ? size + 1 + below(9) : any_length(name);
    fs::resize_file(step_ / name, length);
    SCOPED_TRACE(str("trial ", trial, ": ", name, " of ", length, " instead of ", size, " bytes"));
    expect_found(name);
  }
  EXPECT_THAT(lines(verify_step(step_)), ElementsAre());
}

TEST_F(RandomDamage, FindsOverwrittenParts) {
  for (int trial = 0; trial < kTrials / 10; ++trial) {
    const std::string name = any_rank_file();
    const auto start = static_cast<size_t>(header_bytes(files_[name]));
    const size_t begin = start + below(files_[name].size() - start);
    const size_t length = 1 + below(files_[name].size() - begin);
    std::string damaged = files_[name];
    std::generate_n(damaged.begin() + static_cast<std::ptrdiff_t>(begin), length,
                    [&] { return static_cast<char>(random_()); });
    damaged[begin] =
        static_cast<char>(files_[name][begin] + 1);  // otherwise a single random byte may be the original one
    replace_bytes(step_ / name, damaged);
    const VerifyReport report = verify_step(step_);
    ASSERT_FALSE(report.damages.empty()) << trial;
    for (const Damage& damage : report.damages) EXPECT_EQ(damage.file, step_ / name);
    EXPECT_EQ(report.damages.front().tensor, place_of(name, static_cast<int64_t>(begin)).first) << trial;
    mend(name);
  }
}

TEST_F(RandomDamage, FindsSwappedMixedAndRemovedFiles) {
  const auto copy = [&](const fs::path& from, const std::string& name) {
    fs::remove(step_ / name);
    fs::copy_file(from, step_ / name);
  };
  for (int trial = 0; trial < kTrials / 4; ++trial) {
    SCOPED_TRACE(trial);
    const std::string name = any_rank_file();
    std::string other = any_rank_file();
    while (other == name) other = any_rank_file();
    switch (below(7)) {
      case 0:  // two ranks' files swapped
        fs::rename(step_ / name, step_ / "held");
        fs::rename(step_ / other, step_ / name);
        fs::rename(step_ / "held", step_ / other);
        expect_each_found({std::min(name, other), std::max(name, other)});
        break;
      case 1:  // another step's file
        copy(folder_ / "step-2" / name, name);
        expect_found(name);
        break;
      case 2:  // another run's file
        copy(folder_ / "other/step-1" / name, name);
        expect_found(name);
        break;
      case 3:  // another step's manifest, which contradicts the folder's name
        copy(folder_ / "step-2" / kManifestName, kManifestName);
        expect_each_found({kManifestName, file_name(0), file_name(1), file_name(2), file_name(3)});
        break;
      case 4:  // another run's manifest
        copy(folder_ / "other/step-1" / kManifestName, kManifestName);
        expect_each_found({file_name(0), file_name(1), file_name(2), file_name(3)});
        break;
      case 5: {
        const std::string removed = any_name();
        fs::remove(step_ / removed);
        expect_found(removed);
        break;
      }
      default:  // a link to the right bytes
        fs::rename(step_ / name, folder_ / "moved");
        fs::create_symlink(folder_ / "moved", step_ / name);
        expect_found(name);
    }
  }
  EXPECT_THAT(lines(verify_step(step_)), ElementsAre());
}

}  // namespace
}  // namespace titan::checkpoint
