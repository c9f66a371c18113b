// Models at their real sizes on virtual GPUs in memory-only mode, where the host's part of a step and the allocator's are real, and no number
// is computed: counts of launches, bytes and waits of a block, and the memory that each recipe of configs/ takes on one rank of each role.

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>

#include "dist/device_backend.h"
#include "job/build.h"
#include "job/pipeline_stages.h"
#include "nn/trace_labels.h"
#include "titan/optim/clip.h"
#include "unit/job/load_preset.h"

namespace titan::train {
namespace {

/// The parts of a trainer, without data, checkpoints and observers.
class Training {
 public:
  Training(const JobConfig& config, const dist::World& world)
      : config_(config), world_(world), meshes_(build_job_meshes(config, world)) {
    const TrainingSettings& settings = config.training;
    const auto options = at::TensorOptions(at::kLong).pinned_memory(true);
    for (int64_t i = 0; i < settings.batches_per_step(meshes_.dp_degree()); ++i)
      batches_.push_back({.input_BS = at::zeros({settings.local_batch_size, settings.seq_len}, options),
                          .labels_BS = at::zeros({settings.local_batch_size, settings.seq_len}, options),
                          .valid_tokens = settings.local_batch_size * settings.seq_len});
    built_ = build_models(config, meshes_, static_cast<int64_t>(batches_.size()));
    optim::OptimizerSettings optimizer = config.optimizer;
    optimizer.args = config.optimizer_args.settings;
    optimizer_.emplace(built_.parameters, optimizer, names_elsewhere(built_.parameters, meshes_));
  }

  void step() {
    const int64_t tokens =
        batches_[0].valid_tokens * static_cast<int64_t>(batches_.size()) * meshes_.dp_degree();
    built_.runner->forward_backward(batches_, tokens);
    const at::NoGradGuard no_grad;
    const auto norm = optim::launch_clip_grad_norm(built_.parameters, config_.training.max_norm,
                                                   world_.device(), meshes_.pp);
    optimizer_->step_unless(at::zeros({}, at::TensorOptions(world_.device()).dtype(at::kFloat)));
  }
  TrainableModel& model() { return *built_.models[0]; }

 private:
  const JobConfig& config_;
  dist::World world_;
  Meshes meshes_;
  std::vector<data::Batch> batches_;
  BuiltModels built_;
  std::optional<optim::Optimizer> optimizer_;
};

template <class Function>
Function* function_of(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}
// The sum of a field over modules whose names begin so, and over names; null stands for all of them.
int64_t count(const char* field, const char* module, const char* name = nullptr) {
  static const auto function =
      function_of<uint64_t(const char*, const char*, const char*)>("virtual_gpu_count");
  return static_cast<int64_t>(function(field, module, name));
}

bool in_memory_only_mode() {
  const char* mode = std::getenv("VIRTUAL_GPU_MEMORY_ONLY");
  return mode && function_of<void()>("virtual_gpu_count");
}

// FSDP of an 8B model with two of its blocks, on two ranks over NCCL. A change that adds a launch, a collective, an allocation or a wait to a
// step changes these numbers, of which docs/virtual_gpu.md has a table. The allocator needs a few steps until it has all its memory.
TEST(Block, CountsOfASteadyStepAreKnown) {
  if (!in_memory_only_mode()) GTEST_SKIP() << "runs on virtual GPUs in memory-only mode";
  const dist::World world = dist::init({.device = "cuda"});
  const JobConfig config = load_preset(
      "llama3_8b", world.size(),
      {"--model.args.n_layers=2", "--model.args.vocab_size=1024", "--activation_checkpoint.mode=none"});
  Training training(config, world);
  const nn::TraceLabels labels(training.model().root());
  const auto start_counting = function_of<void()>("virtual_gpu_start_counting");
  for (int step = 0; step < 8; ++step) {
    start_counting();
    training.step();
    if (step > 0 && count("calls", nullptr) == 0) break;
  }
  EXPECT_EQ(count("calls", nullptr), 0)
      << "allocations of the device's memory, or communicators, in a steady step";
  EXPECT_EQ(count("host_waits", nullptr), 0);

  EXPECT_EQ(count("launches", "layers.1 backward"), 95);
  const int64_t backward = count("launches", "layers.0 backward") + count("launches", "layers.1 backward");
  EXPECT_EQ(count("launches", "layers.") - backward, 2 * 34);
  EXPECT_EQ(count("launches", "rotary"), 2 * 18);
  EXPECT_LE(count("bytes_read", "layers.1 backward") + count("bytes_written", "layers.1 backward"),
            41'130'000'000);
  // The groups of parameters are the embedding, each block, and the head with the last norm. All are gathered in the forward, blocks again in
  // the backward; ranks also gather one number each.
  EXPECT_EQ(count("launches", nullptr, "ncclAllGather"), 4 + 2 + 1);
  EXPECT_EQ(count("launches", nullptr, "ncclReduceScatter"), 4);
  constexpr int64_t block = 218'112'000, ends = 2 * 1024 * 4096 + 4096;  // parameters
  EXPECT_EQ(count("bytes_written", nullptr, "ncclAllGather"), 2 * (4 * block + ends) + 2 * 8);
  EXPECT_EQ(count("bytes_read", nullptr, "ncclReduceScatter"), 4 * (2 * block + ends));
}

struct Recipe {
  const char* name;
  int world_size;
  double peak_gib;  ///< in tensors, on the rank with most
  int num_stages = 1;
};
void PrintTo(const Recipe& recipe, std::ostream* out) { *out << recipe.name; }

class Recipes : public ::testing::TestWithParam<Recipe> {};

TEST_P(Recipes, FitTheirGpu) {
  if (!in_memory_only_mode()) GTEST_SKIP() << "runs on virtual GPUs in memory-only mode";
  const Recipe& recipe = GetParam();
  const JobConfig config = load_preset(recipe.name, recipe.world_size);
  // One rank of each role: the first, the last, and one of the middle stage.
  std::vector<int> ranks{0, recipe.world_size - 1};
  if (recipe.num_stages > 1) ranks.insert(ranks.begin() + 1, recipe.world_size / 2);
  double largest = 0;
  for (const int rank : ranks) {
    const dist::World world = dist::init(
        {.backend = "fake", .device = "cuda", .fake_rank = rank, .fake_world_size = recipe.world_size});
    dist::DeviceBackend& gpu = *dist::device_backend();
    at::getDeviceAllocator(at::kCUDA)->emptyCache();
    gpu.reset_peak_memory(0);
    Training training(config, world);
    for (int step = 0; step < 2; ++step) training.step();
    const dist::DeviceMemory memory = gpu.memory(0);
    constexpr double gib = 1 << 30;
    std::printf("%s, rank %d: %.2f GiB in tensors, %.2f GiB of the device's %.2f GiB\n", recipe.name, rank,
                static_cast<double>(memory.peak_allocated_bytes) / gib,
                static_cast<double>(memory.peak_reserved_bytes) / gib,
                static_cast<double>(memory.total_bytes) / gib);
    EXPECT_EQ(memory.allocation_retries, 0);
    largest = std::max(largest, static_cast<double>(memory.peak_allocated_bytes) / gib);
  }
  EXPECT_NEAR(largest, recipe.peak_gib, 0.02 * recipe.peak_gib) << "docs/virtual_gpu.md has a table of these";
}

INSTANTIATE_TEST_SUITE_P(
    All, Recipes,
    ::testing::Values(Recipe{"llama3_8b", 8, 40.59}, Recipe{"llama3_8b_2d", 8, 39.51},
                      Recipe{"llama3_8b_3d", 8, 26.56}, Recipe{"llama3_8b_long", 8, 34.27},
                      Recipe{"llama3_70b", 256, 29.72}, Recipe{"llama3_70b_2d", 256, 29.72},
                      Recipe{"llama3_70b_3d", 256, 42.80}, Recipe{"llama3_405b", 512, 34.60},
                      Recipe{"llama3_405b_2d", 512, 34.60}, Recipe{"llama3_405b_3d", 512, 27.24},
                      Recipe{"llama3_405b_pp", 512, 36.22, 16},
                      Recipe{"llama3_405b_pp_interleaved", 512, 38.38, 16}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace titan::train
