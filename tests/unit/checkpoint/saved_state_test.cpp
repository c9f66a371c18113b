#include "titan/checkpoint/step_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <thread>

#include "checkpoint/format/rank_file.h"
#include "checkpoint_files.h"
#include "temp_folder.h"
#include "titan/core/error.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using namespace titan::testing;

template <class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(SavedState, ReadsWholeTensors) {
  const TempFolder folder;
  const CheckpointToSave save = small_checkpoint();
  const SavedState state(save_checkpoint(folder.path(), save));
  EXPECT_EQ(state.bytes_read(), 0);
  for (const WholeTensor& tensor : save.tensors) {
    const at::Tensor read = state.read(tensor.name);
    EXPECT_EQ(read.scalar_type(), tensor.data.scalar_type());
    EXPECT_TRUE(at::equal(read, tensor.data)) << tensor.name;
  }
}

TEST(SavedState, ReadsBoxesIntoStridedTensors) {
  const TempFolder folder;
  const CheckpointToSave save = small_checkpoint();
  const SavedState state(save_checkpoint(folder.path(), save));
  const at::Tensor& whole = data_of(save, "model.embedding");
  for (const Box& box : {Box{{0, 0}, {1, 1}}, Box{{149, 499}, {2, 2}}, Box{{10, 600}, {200, 300}},
                         Box{{299, 0}, {1, 1000}}, Box{{3, 7}, {0, 5}}}) {
    at::Tensor target = at::zeros({box.length[1], box.length[0]}).t();
    state.read("model.embedding", box, target);
    EXPECT_TRUE(at::equal(target, part_of(whole, box)));
  }
}

TEST(SavedState, OpensOnlyTheFilesItNeeds) {
  const TempFolder folder;
  const fs::path step = save_checkpoint(folder.path(), small_checkpoint());
  for (int64_t rank : {0, 2, 3}) fs::remove(step / file_name(rank));
  const SavedState state(step);
  // Rows of the first half and columns of the second: rank 1 has them.
  at::Tensor target = at::zeros({10, 20});
  state.read("model.embedding", Box{{5, 700}, {10, 20}}, target);
  EXPECT_TRUE(
      at::equal(target, data_of(small_checkpoint(), "model.embedding").narrow(0, 5, 10).narrow(1, 700, 20)));
  EXPECT_GT(state.bytes_read(), target.numel() * 4);
  EXPECT_LE(state.bytes_read(), static_cast<int64_t>(fs::file_size(step / file_name(1))));
  EXPECT_THAT(message_of([&] { state.read("model.embedding"); }),
              HasSubstr("rank_00000.safetensors is missing"));
}

TEST(SavedState, ErrorsNameTheProblem) {
  const TempFolder folder;
  const fs::path step = save_checkpoint(folder.path(), small_checkpoint());
  const SavedState state(step);
  EXPECT_THAT(message_of([&] { state.read("model.embeding"); }),
              HasSubstr("no tensor 'model.embeding'; there is 'model.embedding'"));
  EXPECT_THAT(message_of([&] {
                state.read("model.norm", Box{{0}, {7}}, at::zeros({7}, at::kDouble));
              }),
              HasSubstr("'model.norm' has dtype Float, not Double"));
  EXPECT_THAT(message_of([&] {
                state.read("model.norm", Box{{0}, {7}}, at::zeros({6}));
              }),
              HasSubstr("can't be read into a tensor of shape [6]"));
  fs::rename(step / file_name(0), folder / "elsewhere");
  fs::create_symlink(folder / "elsewhere", step / file_name(0));
  EXPECT_THAT(message_of([&] { SavedState(step).read("model.norm"); }), HasSubstr("isn't a regular file"));
}

// As after a writer's bug: the files are undamaged, but the manifest describes other pieces.
TEST(SavedState, RefusesHeadersThatContradictTheManifest) {
  const TempFolder folder;
  const CheckpointToSave save = small_checkpoint();
  const fs::path step = save_checkpoint(folder.path(), save);
  Manifest manifest = read_manifest(step);
  CheckpointToSave other = save;
  for (WholeTensor& tensor : other.tensors)
    if (tensor.name == "model.norm") tensor.layout = {};
  manifest.table = table_of(other);
  const SavedState state(step, manifest);
  EXPECT_THAT(message_of([&] { state.read("model.norm"); }),
              HasSubstr("in its header, tensor 'model.norm' covers [0:"));
  EXPECT_TRUE(at::equal(state.read("model.embedding"), data_of(save, "model.embedding")));
}

TEST(SavedState, SeveralThreadsReadAtOnce) {
  const TempFolder folder;
  const CheckpointToSave save = small_checkpoint();
  const SavedState state(save_checkpoint(folder.path(), save));
  std::vector<std::thread> threads;
  std::vector<int> equal(4, 0);
  for (int& count : equal)
    threads.emplace_back([&] {
      for (int i = 0; i < 5; ++i)
        for (const WholeTensor& tensor : save.tensors)
          count += at::equal(state.read(tensor.name), tensor.data);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(equal, ::testing::Each(5 * static_cast<int>(save.tensors.size())));
}

TEST(OpenFiles, KeepsTheMostRecentlyUsedFilesOpen) {
  const TempFolder folder;
  const CheckpointToSave save = small_checkpoint();
  const fs::path step = save_checkpoint(folder.path(), save);
  const Manifest manifest = read_manifest(step);
  detail::OpenFiles files(step, 2);
  const auto use = [&](int64_t rank) {
    const int64_t before = files.bytes_read();
    files.use(manifest, rank);
    return files.bytes_read() > before;  // its header was read
  };
  EXPECT_TRUE(use(0));
  EXPECT_TRUE(use(1));
  EXPECT_FALSE(use(0));
  EXPECT_TRUE(use(2));  // in place of 1
  EXPECT_FALSE(use(0));
  EXPECT_TRUE(use(1));
  {
    const auto first = files.use(manifest, 0), second = files.use(manifest, 1);
    EXPECT_TRUE(use(3));  // these two stay open, because they are in use
    EXPECT_EQ(first->file().path(), step / file_name(0));
  }
  fs::remove(step / file_name(2));
  EXPECT_THROW(files.use(manifest, 2), Error);
  EXPECT_THROW(files.use(manifest, 2), Error);
}

// A checkpoint of more files than a process may open.
TEST(SavedState, UsesFewDescriptors) {
  const TempFolder folder;
  CheckpointToSave save{.world_size = 400, .tensors = {{"w", at::arange(800.0), {{cut("dp", 400, 1, 0)}}}}};
  const fs::path step = save_checkpoint(folder.path(), save);
  rlimit before = {};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit few = {330, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  const std::string message =
      message_of([&] { EXPECT_TRUE(at::equal(SavedState(step).read("w"), save.tensors[0].data)); });
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(message, "no error");
}

}  // namespace
}  // namespace titan::checkpoint
