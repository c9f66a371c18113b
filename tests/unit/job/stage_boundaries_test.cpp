// The tensors that one rank sends between the stages of the debug Llama, from a run on meta tensors.

#include <gtest/gtest.h>

#include "job/pipeline_stages.h"
#include "unit/job/load_preset.h"

namespace titan::train {
namespace {

std::vector<TensorType> boundaries_of(int world_size, int rank, Words words, int64_t rows = 1,
                                      int64_t seq_len = 256) {
  words.insert(words.begin(), {"--parallelism.pipeline_parallel_degree", "2"});
  const JobConfig config = load_preset("llama3_debug", world_size, words);
  const dist::World world = dist::init({.backend = "fake", .fake_rank = rank, .fake_world_size = world_size});
  return stage_boundaries(config, plan_stages(config), world, rows, seq_len);
}

const Words kTp = {"--parallelism.tensor_parallel_degree", "2"};
const Words kCp = {"--parallelism.context_parallel_degree", "2"};

TEST(StageBoundaries, AreHiddenStatesInTheComputeDtype) {
  const auto boundaries = boundaries_of(2, 0, {}, 3);
  ASSERT_EQ(boundaries.size(), 2u);
  EXPECT_EQ(boundaries[0], (TensorType{{3, 256}, at::kLong}));
  EXPECT_EQ(boundaries[1], (TensorType{{3, 256, 256}, at::kBFloat16}));
  EXPECT_EQ(boundaries_of(2, 1, {"--training.mixed_precision_param", "float32"})[1],
            (TensorType{{1, 256, 256}, at::kFloat}));
  EXPECT_EQ(boundaries_of(4, 1, {}, 1, 128)[1], (TensorType{{1, 128, 256}, at::kBFloat16}));
}

TEST(StageBoundaries, ArePartsOfTheSequence) {
  for (const int rank : {0, 3}) {
    EXPECT_EQ(boundaries_of(4, rank, kTp)[1].sizes, (std::vector<int64_t>{1, 128, 256}));
    EXPECT_EQ(boundaries_of(4, rank, kTp + Words{"--parallelism.no_enable_sequence_parallel"})[1].sizes,
              (std::vector<int64_t>{1, 256, 256}));
    EXPECT_EQ(boundaries_of(4, rank, kCp)[1].sizes, (std::vector<int64_t>{1, 128, 256}));
  }
  EXPECT_EQ(boundaries_of(8, 5, kTp + kCp)[1].sizes, (std::vector<int64_t>{1, 64, 256}));
  EXPECT_EQ(boundaries_of(8, 5, kTp + kCp + Words{"--parallelism.enable_async_tensor_parallel"})[1].sizes,
            (std::vector<int64_t>{1, 64, 256}));
}

// Stages without layers and stages in the middle pass tensors on unchanged, under every parallelism.
TEST(StageBoundaries, AreTheSameBetweenAllStages) {
  const Words eight = {"--parallelism.pipeline_parallel_degree", "8", "--training.local_batch_size", "8"};
  const auto boundaries = boundaries_of(32, 31, eight + kTp + kCp);
  ASSERT_EQ(boundaries.size(), 8u);
  for (size_t stage = 1; stage < 8; ++stage)
    EXPECT_EQ(boundaries[stage], (TensorType{{1, 64, 256}, at::kBFloat16})) << stage;
}

}  // namespace
}  // namespace titan::train
