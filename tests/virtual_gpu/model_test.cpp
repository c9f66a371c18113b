// Models at their real sizes on virtual GPUs in memory-only mode, where the host's part of a step and the allocator's are real, and no number
// is computed: counts of launches, bytes and waits of a block, and the memory that each recipe of configs/ takes on one rank of each role.

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "dist/device_backend.h"
#include "dist/flight_record.h"
#include "job/rehearsal.h"
#include "nn/trace_labels.h"
#include "plan_of.h"
#include "random_job.h"
#include "titan/core/error.h"
#include "titan/nn/hooks.h"
#include "unit/job/load_preset.h"

// A program's function takes the place of a shared library's. Memory-only mode keeps no values, and drawing initial weights took three quarters
// of these tests' time.
void titan::nn::fill(const at::Tensor&, const Init&, const InitStream&, at::IntArrayRef, const Box&) {}

namespace titan::train {
namespace {

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

// With LibTorch's own code of its operations, and LibTitan's own launches.
bool runs_libtorch() {
  const char* mode = std::getenv("VIRTUAL_GPU_LIBTORCH");
  return mode && std::string_view(mode) != "0";
}
bool in_memory_only_mode() {
  return (std::getenv("VIRTUAL_GPU_MEMORY_ONLY") || runs_libtorch()) &&
         function_of<void()>("virtual_gpu_count");
}

// ---- the plan of the same ranks

using nlohmann::json;
using testing::planned_memory;

std::string_view profile() {
  const char* name = std::getenv("VIRTUAL_GPU_PROFILE");
  return name ? name : "h100";
}

json plan_of(const std::string& preset, int world_size, Words words) {
  words.push_back(str("--device=", profile()));
  return testing::plan_of(preset, world_size, words);
}

// ---- counts

/// Counts of this rank in a steady step.
struct StepCounts {
  int64_t launches = 0;
  int64_t operations = 0;  ///< those that aren't NCCL's
  /// Read and written by all but products, attention, collectives, the optimizer and LibTitan's kernels.
  int64_t memory_bound_bytes = 0;
  int64_t kernel_bytes = 0;  ///< read and written by LibTitan's kernels, if they ran
};

StepCounts count_now() {
  StepCounts counts;
  counts.launches = count("launches", nullptr) - count("launches", "fake message");
  counts.operations = count("operations", nullptr) - count("operations", "fake message");
  counts.memory_bound_bytes = count("bytes_read", nullptr) + count("bytes_written", nullptr);
  const auto leave_out = [&counts](const char* name) {
    counts.memory_bound_bytes -= count("bytes_read", nullptr, name) + count("bytes_written", nullptr, name);
  };
  for (const char* name : {"ncclAllGather", "ncclReduceScatter", "ncclAllReduce", "ncclSend and ncclRecv"}) {
    counts.operations -= count("operations", nullptr, name);
    leave_out(name);
  }
  for (const char* name :
       {"aten::mm", "aten::mm.dtype", "aten::addmm_", "aten::addmm.dtype", "cublasLtMatmul",
        "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_cudnn_attention_backward",
        "aten::_foreach_norm", "aten::_fused_adamw_"})
    leave_out(name);
  return counts;
}

enum class Kernels { Launched, Run };

/// The words of an 8B model with so many blocks, and so many tokens a rank.
Words with_sizes(Words words, int world_size, int64_t num_layers, int64_t tokens, int64_t vocabulary) {
  const JobConfig config = load_preset("llama3_8b", world_size, words);
  tokens *= resolve_parallel_dims(config.parallelism, world_size).row_degree();
  words.insert(words.end(),
               {str("--model.args.n_layers=", num_layers), str("--model.args.vocab_size=", vocabulary),
                str("--training.seq_len=", tokens)});
  return words;
}

/// The sixth step of such a model. From the third step on, none takes memory from a device that keeps up with its host. If kernels run, they do
/// in one step more.
StepCounts count_step(const dist::World& world, int64_t num_layers, int64_t tokens, const Words& words,
                      Kernels kernels = Kernels::Launched, int64_t vocabulary = 1024) {
  SCOPED_TRACE(str(num_layers, " blocks, ", tokens, " tokens"));
  Rehearsal training(
      load_preset("llama3_8b", world.size(), with_sizes(words, world.size(), num_layers, tokens, vocabulary)),
      world);
  const nn::TraceLabels labels(training.built().models[0]->root());
  for (int step = 1; step <= 6; ++step) {
    function_of<void()>("virtual_gpu_start_counting")();
    training.step();
    if (step > 2)
      EXPECT_EQ(count("calls", nullptr), 0)
          << "allocations of the device's memory, or communicators, in step " << step;
  }
  EXPECT_EQ(count("host_waits", nullptr), 0);
  StepCounts counts = count_now();
  if (kernels == Kernels::Run) {
    const auto run_kernels = function_of<void(bool)>("virtual_gpu_run_kernels");
    run_kernels(true);
    function_of<void()>("virtual_gpu_start_counting")();
    training.step();
    count("launches", nullptr);  // waits until they have run
    run_kernels(false);
    counts.kernel_bytes = count_now().memory_bound_bytes - counts.memory_bound_bytes;
  }
  return counts;
}

/// The counts that one more block adds to a step.
StepCounts count_block(const dist::World& world, int64_t tokens, const Words& words,
                       Kernels kernels = Kernels::Launched) {
  const StepCounts two = count_step(world, 2, tokens, words, kernels),
                   three = count_step(world, 3, tokens, words, kernels);
  return {three.launches - two.launches, three.operations - two.operations,
          three.memory_bound_bytes - two.memory_bound_bytes, three.kernel_bytes - two.kernel_bytes};
}

/// The bytes that LibTitan's kernels move for one more block on rank 0, by its plan.
int64_t planned_kernel_bytes(int world_size, int64_t tokens, const Words& words) {
  const auto of_step = [&](int64_t num_layers) {
    const json plan =
        plan_of("llama3_8b", world_size, with_sizes(words, world_size, num_layers, tokens, 1024));
    double bytes = 0;
    for (const json& row : plan.at("operations"))
      if (row.at("role") == planned_memory(plan, 0).at("role") &&
          row.at("operation").get<std::string>().ends_with("_kernel"))
        bytes += row.at("bytes_read").get<double>() + row.at("bytes_written").get<double>();
    return static_cast<int64_t>(bytes);
  };
  return of_step(3) - of_step(2);
}

// Ranks over NCCL, which join only once.
const dist::World& nccl_world() {
  static const dist::World world = dist::init({.device = "cuda"});
  return world;
}

// A change that adds a launch, a collective, an allocation or a wait to a step changes these numbers, of which docs/gpu_performance.md has a
// table.
TEST(Block, LaunchesOfASteadyStepAreKnown) {
  if (!in_memory_only_mode()) GTEST_SKIP() << "runs on virtual GPUs in memory-only mode";
  const StepCounts block = count_block(nccl_world(), 8192, {"--activation_checkpoint.mode=none"});
  EXPECT_EQ(block.operations, 38);
  EXPECT_EQ(block.launches, 41);
  // Those of the last block by module. The sum with its input is the block's own; its backward has no parts, and FSDP's copy of the gathered
  // block before it.
  const int64_t backward = count("launches", "layers.2 backward");
  EXPECT_EQ(count("launches", "layers.2", "aten::add"), 1);
  EXPECT_EQ(count("launches", "layers.2.attention.wq+wk+wv"), 3);
  EXPECT_EQ(count("launches", "layers.2") - backward, 12);
  EXPECT_EQ(backward, 24);
}

// The groups of parameters are the embedding, each block, and the head with the last norm. All are gathered in the forward, blocks again
// in the backward; ranks also gather one number each.
TEST(Block, CollectivesOfASteadyStepAreKnown) {
  if (!in_memory_only_mode()) GTEST_SKIP() << "runs on virtual GPUs in memory-only mode";
  count_step(nccl_world(), 2, 8192, {"--activation_checkpoint.mode=none"});
  EXPECT_EQ(count("launches", nullptr, "ncclAllGather"), 4 + 2 + 1);
  EXPECT_EQ(count("launches", nullptr, "ncclReduceScatter"), 4);
  constexpr int64_t block = 218'112'000, ends = 2 * 1024 * 4096 + 4096;  // parameters
  EXPECT_EQ(count("bytes_written", nullptr, "ncclAllGather"), 2 * (4 * block + ends) + 2 * 8);
  EXPECT_EQ(count("bytes_read", nullptr, "ncclReduceScatter"), 4 * (2 * block + ends));
}

// Gradients are read by their norm, and once by the optimizer, which clips them. Operations on a few numbers aside, these are all launches
// after the last reduction.
TEST(Block, ClippingTakesNoPassOverTheGradients) {
  if (!in_memory_only_mode()) GTEST_SKIP() << "runs on virtual GPUs in memory-only mode";
  count_step(nccl_world(), 2, 8192, {"--activation_checkpoint.mode=none"});
  EXPECT_EQ(count("launches", nullptr, "aten::_foreach_norm"), 1);
  EXPECT_EQ(count("launches", nullptr, "aten::_fused_adamw_"), 1);
  EXPECT_EQ(count("launches", nullptr, "aten::_foreach_mul_"), 0);
}

// With VIRTUAL_GPU_LAZY_LOADING. In a pipeline's later steps a kernel that has to be loaded could wait for a receive forever
// ([Note: first run of a schedule]).
TEST(Loading, TheFirstStepLoadsAllKernels) {
  const auto num_loaded = function_of<int()>("virtual_gpu_num_loaded");
  if (!in_memory_only_mode() || !std::getenv("VIRTUAL_GPU_LAZY_LOADING"))
    GTEST_SKIP() << "runs on virtual GPUs in memory-only mode that load kernels lazily";
  const Words delayed = {"--model.converters=quantize.linear.float8",
                         "--quantize.linear.float8.scaling_type_input=delayed",
                         "--quantize.linear.float8.scaling_type_weight=delayed",
                         "--quantize.linear.float8.scaling_type_grad_output=delayed"};
  const dist::World world = dist::init({.device = "cuda"});
  for (const Words& words : {Words{}, delayed}) {
    Rehearsal training(load_preset("llama3_8b", 1, with_sizes(words, 1, 2, 1024, 1024)), world);
    training.step();
    const int after_first = num_loaded();
    EXPECT_GT(after_first, 10);
    for (int step = 2; step <= 4; ++step) training.step();
    EXPECT_EQ(num_loaded(), after_first) << (words.empty() ? "in bf16" : "with delayed scales");
  }
}

// The loss, and the gradients of hidden states and weight: products, too. Each chunk of tokens reads and writes the weight's whole gradient.
TEST(LossHead, BytesOfASteadyStepAreKnown) {
  if (!in_memory_only_mode()) GTEST_SKIP() << "runs on virtual GPUs in memory-only mode";
  constexpr int64_t tokens = 8192, vocabulary = 128'256;
  count_step(nccl_world(), 1, tokens, {"--activation_checkpoint.mode=none"}, Kernels::Launched, vocabulary);
  ASSERT_GT(count("launches", "output", "cross_entropy_kernel"), 0);
  EXPECT_EQ(count("launches", "output backward", "aten::mul_"), 2) << "each gradient is scaled in one pass";
  constexpr int64_t by_kernel =
      2 * tokens * vocabulary * 2;  // it isn't run; it reads and writes the logits in bf16
  const int64_t bytes = count("bytes_read", "output") + count("bytes_written", "output") + by_kernel;
  std::printf("the loss head: %.2f GB\n", static_cast<double>(bytes) / 1e9);
  EXPECT_LE(bytes, 27'000'000'000);
}

struct Layout {
  const char* name;
  int world_size;
  Words words;
  StepCounts counts;    ///< those of rank 0; bytes with those of LibTitan's kernels, rounded up
  int64_t num_kernels;  ///< launched by LibTorch's own code, without NCCL's; 0: not known
};
void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name; }

class BlockOf : public ::testing::TestWithParam<Layout> {};

TEST_P(BlockOf, TakesWhatIsKnown) {
  if (!in_memory_only_mode()) GTEST_SKIP() << "runs on virtual GPUs in memory-only mode";
  const auto& [name, world_size, words, counts, num_kernels] = GetParam();
  if (runs_libtorch()) {  // nothing is computed, so no sum shows that NCCL's ranks are connected
    if (num_kernels == 0) GTEST_SKIP() << "needs other ranks";
    const dist::World world =
        dist::init({.backend = "fake", .device = "cuda", .fake_rank = 0, .fake_world_size = world_size});
    const StepCounts block = count_block(world, 8192, words);
    std::printf("a block of %s: %ld operations, %ld launches of kernels\n", name, block.operations,
                block.launches);
    EXPECT_EQ(block.operations, counts.operations);
    EXPECT_EQ(block.launches, num_kernels);
    return;
  }
  if (nccl_world().size() != world_size) GTEST_SKIP() << "runs on " << world_size << " ranks";
  const StepCounts block = count_block(nccl_world(), 8192, words);
  // Kernels at 8,192 tokens, and casts of a whole block's weights, would run for minutes. 512 rows are still more than norms have partial sums.
  constexpr int64_t few = 512;
  Words narrow = words;
  narrow.insert(narrow.end(),
                {"--model.args.dim=1024", "--model.args.n_heads=16", "--model.args.n_kv_heads=8"});
  const StepCounts short_block = count_block(nccl_world(), few, narrow, Kernels::Run);
  if (nccl_world().rank() != 0) {  // a ring's last rank adds up one part less
    EXPECT_LE(block.operations, counts.operations);
    EXPECT_LE(block.launches, counts.launches);
    return;
  }
  EXPECT_EQ(block.operations, counts.operations);
  EXPECT_EQ(block.launches, counts.launches);
  const auto planned = static_cast<double>(planned_kernel_bytes(world_size, few, narrow));
  std::printf("kernels of a narrow block and %ld tokens: %.4f GB, planned %.4f\n", few,
              static_cast<double>(short_block.kernel_bytes) / 1e9, planned / 1e9);
  EXPECT_NEAR(static_cast<double>(short_block.kernel_bytes), planned, 0.01 * planned);
  const auto most = static_cast<double>(counts.memory_bound_bytes),
             bytes = static_cast<double>(block.memory_bound_bytes +
                                         planned_kernel_bytes(world_size, 8192, words));
  std::printf("a block of %s: %ld operations, %ld launches, %.2f GB in memory-bound operations\n", name,
              block.operations, block.launches, bytes / 1e9);
  EXPECT_LE(bytes, most);
  EXPECT_GE(bytes, 0.98 * most);
}

INSTANTIATE_TEST_SUITE_P(
    All, BlockOf,
    ::testing::Values(
        Layout{"Fsdp", 2, {"--activation_checkpoint.mode=none"}, {41, 38, 5'400'000'000}, 58},
        // Lists of smaller parts of a block take fewer kernels.
        Layout{"FsdpOverEightRanks", 8, {"--activation_checkpoint.mode=none"}, {41, 38, 4'100'000'000}, 42},
        Layout{"FsdpWithRecompute",
               2,
               {"--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"},
               {47, 44, 6'000'000'000},
               64},
        Layout{"FsdpInTwoMicroBatches",
               2,
               {"--activation_checkpoint.mode=none", "--training.global_batch_size=4"},
               {83, 77, 12'100'000'000},
               107},
        Layout{"TensorParallel",
               8,
               {"--activation_checkpoint.mode=none", "--parallelism.tensor_parallel_degree=8"},
               {54, 45, 980'000'000},
               47},
        // Rows are gathered and scattered in their places.
        Layout{"TensorParallelOfTwoRows",
               8,
               {"--activation_checkpoint.mode=none", "--parallelism.tensor_parallel_degree=8",
                "--training.local_batch_size=2"},
               {54, 45, 1'430'000'000},
               47},
        Layout{"TensorParallelInBfloat16",
               8,
               {"--activation_checkpoint.mode=none", "--parallelism.tensor_parallel_degree=8",
                "--training.dtype=bfloat16"},
               {53, 44, 820'000'000},
               46},
        Layout{"AsyncTensorParallel",
               2,
               {"--activation_checkpoint.mode=none", "--parallelism.tensor_parallel_degree=2",
                "--parallelism.enable_async_tensor_parallel",
                "--parallelism.async_tensor_parallel_transport=symmetric_memory"},
               {93, 92, 5'300'000'000},
               0},
        Layout{"ContextParallel",
               2,
               {"--activation_checkpoint.mode=none", "--parallelism.context_parallel_degree=2"},
               {70, 63, 8'000'000'000},
               83},
        Layout{"Float8Tensorwise",
               2,
               {"--activation_checkpoint.mode=none", "--model.converters=quantize.linear.float8"},
               {76, 73, 10'800'000'000},
               93},
        Layout{"Float8TensorwiseGathered",
               2,
               {"--activation_checkpoint.mode=none", "--model.converters=quantize.linear.float8",
                "--quantize.linear.float8.enable_fsdp_float8_all_gather"},
               {75, 71, 9'300'000'000},
               81},
        Layout{"Float8Rowwise",
               2,
               {"--activation_checkpoint.mode=none", "--model.converters=quantize.linear.float8",
                "--quantize.linear.float8.recipe_name=rowwise"},
               {91, 88, 10'900'000'000},
               108}),
    [](const auto& info) { return std::string(info.param.name); });

// ---- memory

struct Recipe {
  const char* name;
  int world_size;
  double tensors_gib, device_gib;  ///< peaks in tensors and from the device, each on the rank with most
  const char* variant = "";        ///< a name for what the words change
  Words words = {};
};
void PrintTo(const Recipe& recipe, std::ostream* out) { *out << recipe.name << recipe.variant; }

// ---- steps beside their plans

using Counts = std::map<std::string, int64_t>;

// LibTorch's own product of Float8 matrices runs on virtual GPUs, too, so what is counted is what it calls. A plan names copies by where they go.
std::string name_of_launch(const std::string& operation) {
  if (operation.starts_with("cudaMemcpyAsync ")) return "cudaMemcpyAsync";
  return operation == "aten::_scaled_mm" ? "cublasLtMatmul" : operation;
}

Counts planned_launches(const json& plan, const std::string& role) {
  Counts counts;
  for (const json& row : plan.at("operations"))
    if (row.at("role") == role)
      counts[name_of_launch(row.at("operation"))] += row.at("launches").get<int64_t>();
  return counts;
}

// Those of the planned ones, and what else there is. The copies that stand for messages aren't counted, because a rank doesn't launch them.
Counts launches_of(const Counts& planned) {
  const auto launches_by = [](const char* operation) {
    return count("operations", nullptr, operation) - count("operations", "fake message", operation);
  };
  Counts counts;
  int64_t others = launches_by(nullptr);
  for (const auto& [operation, launches] : planned) {
    counts[operation] = launches_by(operation.c_str());
    others -= counts[operation];
  }
  if (others != 0) counts["others"] = others;
  return counts;
}

// The recorder also has the numbers of a norm that go between hosts.
constexpr std::string_view kNorm = "optim::grad_norm";

Counts planned_collectives(const json& plan, const std::string& role) {
  Counts counts;
  for (const json& row : plan.at("collectives")) {
    const int64_t calls = row.at("calls"), bytes = row.at("bytes");
    if (row.at("role") != role || row.at("label") == kNorm) continue;
    const std::string kind = row.at("group").get<std::string>() + " " + row.at("op").get<std::string>();
    counts[kind + " calls"] += calls;
    counts[kind + " bytes"] += bytes;
  }
  return counts;
}

/// Calls and bytes by group and kind.
Counts collectives_since(const dist::World& world, uint64_t first) {
  Counts counts;
  for (uint64_t number = first; number < world.recorder().num_calls(); ++number) {
    dist::CallRecord call;
    if (!world.recorder().read(number, call) || call.phase == kNorm) continue;
    counts[str(call.group->name, " ", name_of(call.op), " calls")] += 1;
    counts[str(call.group->name, " ", name_of(call.op), " bytes")] += call.bytes;
  }
  return counts;
}

class Recipes : public ::testing::TestWithParam<Recipe> {};

int64_t num_allocations() {
  return at::getDeviceAllocator(at::kCUDA)->getDeviceStats(0).allocation[0].allocated;
}

void expect_as_planned(const json& plan, int rank, const dist::DeviceMemory& memory,
                       const Counts& collectives, int64_t allocations, bool host_clips) {
  const json& planned = planned_memory(plan, rank);
  const auto expect_equal = [](const char* what, int64_t measured, int64_t planned) {
    std::printf("  %s: %.3f GiB, planned %.3f\n", what, static_cast<double>(measured) / (1 << 30),
                static_cast<double>(planned) / (1 << 30));
    EXPECT_EQ(planned, measured) << what;
  };
  expect_equal("in tensors", memory.peak_allocated_bytes, planned.at("peak_allocated_bytes"));
  expect_equal("from the device", memory.peak_reserved_bytes, planned.at("peak_reserved_bytes"));
  for (const json& step : plan.at("step"))
    if (step.at("role") == planned.at("role")) {
      const int64_t planned_allocations = step.at("allocations");
      std::printf("  allocations: %lld, planned %lld\n", static_cast<long long>(allocations),
                  static_cast<long long>(planned_allocations));
      // A job's last rank is planned for itself only if it differs by more than that.
      const double tolerance = rank == step.at("rank") ? 0 : 0.01 * static_cast<double>(planned_allocations);
      EXPECT_NEAR(static_cast<double>(planned_allocations), static_cast<double>(allocations), tolerance);
    }
  EXPECT_EQ(planned_collectives(plan, planned.at("role")), collectives);
  const Counts launches = planned_launches(plan, planned.at("role"));
  Counts on_gpu = launches_of(launches);
  for (const auto& [operation, number] : launches) {
    // With such an optimizer the host clips, unless the norm isn't finite; and where nothing is computed, the norm is what the memory holds.
    const bool may_be_left_out =
        host_clips && operation == "aten::_foreach_mul_" && number == on_gpu[operation] + 1;
    if (!may_be_left_out) EXPECT_EQ(number, on_gpu[operation]) << "launches of " << operation << " in a step";
    on_gpu.erase(operation);
  }
  EXPECT_TRUE(on_gpu.empty()) << on_gpu.begin()->second << " launches that aren't planned";
}

/// Runs a step of one rank of each role, and the last one, and compares each with its plan. Returns the ranks' largest memory. `config` is the
/// preset's with the words.
dist::DeviceMemory run_as_planned(const JobConfig& config, const std::string& preset, int world_size,
                                  const Words& words) {
  const json plan = plan_of(preset, world_size, words);
  std::set<int> ranks{world_size - 1};
  for (const json& role : plan.at("memory").at("by_role")) ranks.insert(role.at("rank").get<int>());
  dist::DeviceMemory most;
  for (const int rank : ranks) {
    const dist::World world = dist::init({.backend = "fake",
                                          .device = "cuda",
                                          .flight_entries = 100'000,
                                          .fake_rank = rank,
                                          .fake_world_size = world_size});
    dist::DeviceBackend& gpu = *dist::device_backend();
    at::cuda::clearCublasWorkspaces();  // a rank makes its own where it needs them
    at::getDeviceAllocator(at::kCUDA)->emptyCache();
    gpu.reset_peak_memory(0);
    Rehearsal training(config, world);
    for (int step = 0; step < (config.compile.enable ? Rehearsal::num_usual_steps() : 1); ++step)
      training.step();
    function_of<void()>("virtual_gpu_start_counting")();
    const uint64_t first_call = world.recorder().num_calls();
    const int64_t first_allocation = num_allocations();
    training.step();
    const int64_t allocations = num_allocations() - first_allocation;
    const dist::DeviceMemory memory = gpu.memory(0);
    std::printf("%s, rank %d of %d:\n", preset.c_str(), rank, world_size);
    expect_as_planned(plan, rank, memory, collectives_since(world, first_call), allocations,
                      /*host_clips=*/config.optimizer.implementation != "fused");
    EXPECT_EQ(memory.allocation_retries, 0);
    for (int step = 0; step < 3; ++step) training.step();
    constexpr int64_t small_segment =
        2 << 20;  // for blocks of up to 1 MiB; 8B in Float8 with delayed scales takes one more
    EXPECT_LE(gpu.memory(0).reserved_bytes, memory.reserved_bytes + small_segment)
        << "later steps find the same memory free";
    most.peak_allocated_bytes = std::max(most.peak_allocated_bytes, memory.peak_allocated_bytes);
    most.peak_reserved_bytes = std::max(most.peak_reserved_bytes, memory.peak_reserved_bytes);
  }
  return most;
}

TEST_P(Recipes, FitTheirGpu) {
  if (!in_memory_only_mode()) GTEST_SKIP() << "runs on virtual GPUs in memory-only mode";
  const Recipe& recipe = GetParam();
  const JobConfig config = load_preset(recipe.name, recipe.world_size, recipe.words);
  const dist::DeviceMemory memory = run_as_planned(config, recipe.name, recipe.world_size, recipe.words);
  if (profile() != "h100") return;
  constexpr double gib = 1 << 30;
  EXPECT_NEAR(static_cast<double>(memory.peak_allocated_bytes) / gib, recipe.tensors_gib, 0.0051)
      << "docs/plan.md has a table of these";
  EXPECT_NEAR(static_cast<double>(memory.peak_reserved_bytes) / gib, recipe.device_gib, 0.0051)
      << "docs/plan.md has a table of these";
}

INSTANTIATE_TEST_SUITE_P(
    All, Recipes,
    ::testing::Values(Recipe{"llama3_8b", 8, 33.95, 34.59}, Recipe{"llama3_8b_2d", 8, 34.02, 34.49},
                      Recipe{"llama3_8b_3d", 8, 21.42, 21.76}, Recipe{"llama3_8b_long", 8, 25.60, 26.22},
                      Recipe{"llama3_70b", 256, 21.62, 22.25}, Recipe{"llama3_70b_2d", 256, 21.62, 22.25},
                      Recipe{"llama3_70b_3d", 256, 34.00, 34.81}, Recipe{"llama3_405b", 512, 28.10, 28.84},
                      Recipe{"llama3_405b_2d", 512, 28.10, 28.84},
                      Recipe{"llama3_405b_3d", 512, 22.76, 23.15},
                      Recipe{"llama3_405b_pp", 512, 35.28, 36.72},
                      Recipe{"llama3_405b_pp_interleaved", 512, 37.16, 37.40}),
    [](const auto& info) { return std::string(info.param.name); });

Recipe with(const char* variant, Words words, Recipe recipe) {
  recipe.variant = variant;
  recipe.words = std::move(words);
  return recipe;
}

const std::string kFloat8 = "--model.converters=quantize.linear.float8";
const std::string kSettings = "--quantize.linear.float8.";

INSTANTIATE_TEST_SUITE_P(
    Variants, Recipes,
    ::testing::Values(
        with("_float8", {kFloat8}, {"llama3_8b", 8, 34.09, 34.88}),
        with("_float8_gathered", {kFloat8, kSettings + "enable_fsdp_float8_all_gather"},
             {"llama3_8b", 8, 33.69, 34.38}),
        with("_float8_rowwise", {kFloat8, kSettings + "recipe_name=rowwise"}, {"llama3_8b", 8, 34.11, 34.90}),
        with("_float8_delayed",
             {kFloat8, kSettings + "scaling_type_input=delayed", kSettings + "scaling_type_weight=delayed",
              kSettings + "scaling_type_grad_output=delayed"},
             {"llama3_8b", 8, 34.15, 34.84}),
        with("_float8", {kFloat8}, {"llama3_8b_2d", 8, 34.04, 34.74}),
        with("_float8_reduced_once",
             {kFloat8, "--training.global_batch_size=16",
              "--parallelism.fsdp_reduce_every_micro_batch=false"},
             {"llama3_8b", 8, 62.61, 63.59}),
        with("_float8", {kFloat8}, {"llama3_405b_pp", 512, 32.45, 32.88}),
        with("_graphs", {"--compile.enable"}, {"llama3_8b", 8, 33.95, 34.82}),
        with("_graphs", {"--compile.enable"}, {"llama3_8b_3d", 8, 21.42, 21.78}),
        with("_graphs", {"--compile.enable"}, {"llama3_405b_pp", 512, 35.28, 36.72}),
        with("_float8_graphs", {kFloat8, "--compile.enable"}, {"llama3_8b", 8, 34.09, 34.99}),
        with("_bfloat16_states", {"--optimizer.state_dtype=bfloat16"}, {"llama3_8b", 8, 30.21, 30.86}),
        with("_bfloat16", {"--training.dtype=bfloat16", "--optimizer.stochastic_rounding"},
             {"llama3_8b", 8, 26.82, 27.45}),
        with("_hsdp", {"--parallelism.data_parallel_replicate_degree=2"}, {"llama3_8b", 16, 34.30, 34.92}),
        with("_ddp",
             {"--parallelism.data_parallel_replicate_degree=8", "--parallelism.data_parallel_shard_degree=1",
              "--model.args.n_layers=8"},
             {"llama3_8b", 8, 47.45, 48.02})),
    [](const auto& info) { return str(info.param.name, info.param.variant); });

// ---- layouts drawn at random

TEST(RandomJobs, TakeWhatIsPlanned) {
  if (!in_memory_only_mode()) GTEST_SKIP() << "runs on virtual GPUs in memory-only mode";
  const auto number = [](const char* name, int otherwise) {
    const char* text = std::getenv(name);
    return text ? std::atoi(text) : otherwise;
  };
  const int first = number("TITAN_TEST_SEED", 1), count = number("TITAN_TEST_JOBS", 1);
  int refused = 0;
  for (int seed = first; seed < first + count; ++seed) {
    const testing::RandomJob job(static_cast<uint32_t>(seed), profile() != "a100");
    std::string line = str("seed ", seed, ": llama3_8b, ", job.world_size(), " ranks,");
    for (const std::string& word : job.words()) line += " " + word;
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, line);
    std::printf("%s\n", line.c_str());
    std::optional<JobConfig> config;
    try {
      config = load_preset("llama3_8b", job.world_size(), job.words());
    } catch (const ConfigError& error) {
      ++refused;
      std::printf("refused: %s\n", error.what());
      continue;
    }
    try {
      run_as_planned(*config, "llama3_8b", job.world_size(), job.words());
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    std::fflush(stdout);
  }
  EXPECT_LE(2 * refused, count);
}

}  // namespace
}  // namespace titan::train
