// Checkpoints in a storage that a user registers.

#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "distributed/checkpoint_saver.h"
#include "titan/checkpoint/safetensors.h"
#include "titan/checkpoint/storage.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
using namespace titan::testing;

/// Folders and files in this process's memory.
class MemoryStorage : public Storage {
 public:
  std::vector<std::string> list(const fs::path& folder) override {
    std::lock_guard lock(mutex_);
    std::set<std::string> names;
    for (const auto& [path, contents] : all_)
      if (fs::path(path).parent_path() == folder) names.insert(fs::path(path).filename().string());
    return {names.begin(), names.end()};
  }
  Status status(const fs::path& path) override {
    std::lock_guard lock(mutex_);
    const auto found = all_.find(path.string());
    if (found == all_.end()) return {};
    if (!found->second) return {Kind::Folder};
    return {Kind::File, static_cast<int64_t>(found->second->size())};
  }
  std::unique_ptr<Reader> open(const fs::path& file) override {
    std::lock_guard lock(mutex_);
    const auto found = all_.find(file.string());
    if (found == all_.end() || !found->second) throw Error(str("there is no file ", file.string()));
    return std::make_unique<MemoryReader>(found->second);
  }
  std::unique_ptr<Writer> create(const fs::path& file, int64_t num_bytes) override {
    std::lock_guard lock(mutex_);
    if (!all_.count(file.parent_path().string())) throw Error(str("there is no folder for ", file.string()));
    auto bytes = std::make_shared<std::string>(static_cast<size_t>(num_bytes), '\0');
    all_[file.string()] = bytes;
    return std::make_unique<MemoryWriter>(*this, file, bytes);
  }
  void make_folder(const fs::path& folder) override {
    std::lock_guard lock(mutex_);
    for (fs::path each = folder; each.has_parent_path() && each != each.parent_path();
         each = each.parent_path())
      all_.emplace(each.string(), nullptr);
  }
  void rename(const fs::path& from, const fs::path& to) override {
    std::lock_guard lock(mutex_);
    std::map<std::string, Contents> renamed;
    for (const auto& [path, contents] : all_)
      renamed[is_in(path, from) ? to.string() + path.substr(from.string().size()) : path] = contents;
    all_ = std::move(renamed);
  }
  void remove(const fs::path& path) override {
    std::lock_guard lock(mutex_);
    std::erase_if(all_, [&](const auto& entry) { return is_in(entry.first, path); });
  }

 private:
  using Contents = std::shared_ptr<std::string>;  // null: a folder

  class MemoryReader : public Reader {
   public:
    explicit MemoryReader(Contents bytes) : bytes_(std::move(bytes)) {}
    int64_t num_bytes() const override { return static_cast<int64_t>(bytes_->size()); }
    void read(std::span<std::byte> into, int64_t offset) const override {
      if (static_cast<size_t>(offset) + into.size() > bytes_->size()) throw Error("the file ends too early");
      std::memcpy(into.data(), bytes_->data() + offset, into.size());
    }

   private:
    Contents bytes_;
  };

  class MemoryWriter : public Writer {
   public:
    MemoryWriter(MemoryStorage& storage, fs::path path, Contents bytes)
        : storage_(storage), path_(std::move(path)), bytes_(std::move(bytes)) {}
    ~MemoryWriter() override {
      if (!finished_) storage_.remove(path_);
    }
    void write(std::span<const std::span<const std::byte>> parts, int64_t offset) override {
      for (const auto& part : parts) {
        std::memcpy(bytes_->data() + offset, part.data(), part.size());
        offset += static_cast<int64_t>(part.size());
      }
    }
    void finish() override { finished_ = true; }

   private:
    MemoryStorage& storage_;
    fs::path path_;
    Contents bytes_;
    bool finished_ = false;
  };

  static bool is_in(const std::string& path, const fs::path& folder) {
    return path == folder.string() || path.starts_with(folder.string() + "/");
  }

  std::mutex mutex_;
  std::map<std::string, Contents> all_;
};

/// "there:/A/B" is /A/B on the local disk, which several processes can share; counts its calls.
class RedirectedStorage : public Storage {
 public:
  std::vector<std::string> list(const fs::path& folder) override { return local().list(real(folder)); }
  Status status(const fs::path& path) override { return local().status(real(path)); }
  std::unique_ptr<Reader> open(const fs::path& file) override { return local().open(real(file)); }
  std::unique_ptr<Writer> create(const fs::path& file, int64_t num_bytes) override {
    return local().create(real(file), num_bytes);
  }
  void make_folder(const fs::path& folder) override { local().make_folder(real(folder)); }
  void rename(const fs::path& from, const fs::path& to) override { local().rename(real(from), real(to)); }
  void remove(const fs::path& path) override { local().remove(real(path)); }
  std::shared_ptr<const void> lock(const fs::path& folder) override { return local().lock(real(folder)); }

  int num_calls() const { return num_calls_; }

 private:
  static Storage& local() { return storage_of("/"); }
  fs::path real(const fs::path& path) {
    ++num_calls_;
    return path.string().substr(std::string("there:").size());
  }
  std::atomic<int> num_calls_{0};
};

MemoryStorage& memory() {
  static const auto storage = [] {
    auto made = std::make_shared<MemoryStorage>();
    storages().add("memory", made);
    return made;
  }();
  return *storage;
}

RedirectedStorage& redirected() {
  static const auto storage = [] {
    auto made = std::make_shared<RedirectedStorage>();
    storages().add("there", made);
    return made;
  }();
  return *storage;
}

TEST(Storage, RegisteredStorageHoldsWholeCheckpoints) {
  if (world().size() > 1) GTEST_SKIP() << "ranks are processes, which share no memory";
  memory();
  const fs::path folder = "memory://runs/first";  // the same as memory:/runs/first
  ToyJob job(world(), {1, 1, 1});
  Checkpointer checkpointer(world(), {}, {.folder = folder, .keep_latest = 2, .num_threads = 3});
  job.add_to(checkpointer);
  for (const int64_t step : {7, 8, 9}) {
    job.fill(step);
    EXPECT_TRUE(checkpointer.save(step));
    checkpointer.finish();
  }
  EXPECT_THAT(memory().list("memory:/runs/first"), ElementsAre("step-8", "step-9"));
  EXPECT_THAT(memory().list("memory:/runs/first/step-9"),
              ElementsAre("manifest.json", "rank_00000.safetensors"));
  std::vector<std::string> problems;
  EXPECT_EQ(newest_complete("memory:/runs/first", problems), 9);
  EXPECT_THAT(problems, IsEmpty());
  EXPECT_THAT(verify_step("memory:/runs/first/step-9").damages, IsEmpty());
  checkpointer.load("memory:/runs/first/step-8");
  job.check(8);
  // Replaces a step of the same number in a storage that can't exchange names.
  job.fill(9);
  EXPECT_TRUE(checkpointer.save(9));
  checkpointer.finish();
  EXPECT_THAT(memory().list("memory:/runs/first"), ElementsAre("step-8", "step-9"));
}

TEST(Storage, RanksShareARegisteredStorage) {
  const SharedFolder shared;
  const fs::path folder = "there:" + (shared / "steps").string();
  const int before = redirected().num_calls();
  for (const StateLayout& layout : layouts_of(world().size())) {
    const fs::path here = folder / layout.name();
    ToyJob job(world(), layout);
    Checkpointer checkpointer(world(), job.mesh["pp"], {.folder = here});
    job.add_to(checkpointer);
    job.fill(3);
    EXPECT_TRUE(checkpointer.save(3));
    checkpointer.finish();
    job.fill(4);
    checkpointer.load(step_path(here, 3));
    job.check(3);
    check_saved(step_path(shared / "steps" / layout.name(), 3), 3);  // the same files by their local names
  }
  EXPECT_GT(redirected().num_calls(), before);
  EXPECT_FALSE(fs::exists("there:")) << "something bypassed the storage";
}

TEST(Storage, FailedSaveLeavesNothing) {
  const SharedFolder shared;
  redirected();
  ToyJob job(world(), {1, 1, world().size()});
  const auto fail = [](SavePhase phase) {
    if (phase == SavePhase::Commit) throw Error("told to fail");
  };
  Checkpointer checkpointer(world(), {},
                            {.folder = "there:" + (shared / "steps").string(), .on_phase = fail});
  job.add_to(checkpointer);
  job.fill(1);
  EXPECT_THROW(checkpointer.save(1), Error);
  EXPECT_THAT(leftovers(shared / "steps"), IsEmpty());
  EXPECT_THAT(list_steps(shared / "steps"), IsEmpty());
}

TEST(Storage, RefusesUnknownSchemesAndModelFiles) {
  const auto message_of = [](const auto& call) -> std::string {
    try {
      call();
      return "";
    } catch (const ConfigError& error) {
      return error.what();
    }
  };
  redirected();
  EXPECT_THAT(message_of([] { list_steps("ssh:/runs"); }), HasSubstr("unknown checkpoint storage 'ssh'"));
  EXPECT_THAT(message_of([] { save_safetensors("there:/model.safetensors", {}); }),
              HasSubstr("there:/model.safetensors: a safetensors file has to be on a local path"));
}

}  // namespace
}  // namespace titan::checkpoint
