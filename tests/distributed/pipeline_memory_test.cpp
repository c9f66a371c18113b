// The peak memory of a schedule's stages, and the amount of their computation, match the simulator and the
// papers.

#include <algorithm>
#include <iterator>
#include <string_view>

#include <gtest/gtest.h>

#include "distributed/pipeline_case.h"
#include "memory_meter.h"
#include "titan/nn/layers.h"
#include "titan/parallel/pipeline_schedule.h"
#include "unit/parallel/checkpoint_case.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names

constexpr int kMicroBatches = 8;
constexpr int64_t kLayers = 16;

// Wide enough that activations are much larger than the runner's own memory, with a tiny vocabulary.
// Embedding and head count for no layers, so every stage has the same number of layers: enough of them that
// the temporary memory of one layer's backward is small beside a stage's micro-batch.
LlamaCase model() {
  LlamaCase llama = mini_llama();
  llama.args["n_layers"] = kLayers;
  llama.args["n_kv_heads"] = int64_t{4};
  llama.args["vocab_size"] = int64_t{32};
  llama.rows = kMicroBatches;
  llama.seq_len = 128;
  return llama;
}

// For each layer, F keeps the inputs of each norm and product, q, k, v and attention's result (8 D, where D
// is the width), and gate and up (2 F, where F is the feed-forward's width). I leaves for W the inputs of the
// products and the gradients of their outputs (8 D + 3 F, because w2's input is recomputed for it).
double owed_share() {
  const double ffn = 3;  // F / D of mini_llama
  return (8 + 3 * ffn) / (8 + 2 * ffn);
}

// The schedule's peak on this rank, in units of a stage's micro-batch between F and I.
double held_at_most(const pipeline::Schedule& schedule, int rank) {
  using Kind = pipeline::Action::Kind;
  double held = 0, peak = 0;
  for (const pipeline::Action& action : schedule.ranks[static_cast<size_t>(rank)]) {
    if (action.kind == Kind::Forward) held += 1;
    if (action.kind == Kind::BackwardInput) held += owed_share() - 1;
    peak = std::max(peak, held);
    if (action.kind == Kind::Backward) held -= 1;
    if (action.kind == Kind::BackwardWeight) held -= owed_share();
  }
  return peak;
}

struct Measured {
  double peak_bytes = 0;  // in addition to memory from before the step
  int64_t multiplications = 0;
  pipeline::RankFigures simulated;
  double held = 0;  // held_at_most()
};

Measured run(std::string_view schedule, int stages, size_t checkpointing = 0) {
  const LlamaCase llama = model();
  const Variant variant{{.pp = world().size()}, std::string(schedule), stages, kMicroBatches, 1,
                        checkpointing};
  const train::Meshes meshes = train::build_meshes(world(), variant.dims);
  Stages built(llama, kFloat32, variant, meshes, {.ends = {.first = 0, .last = 0}});
  const auto products = std::make_shared<CountingProducts>();
  for (const train::Stage& stage : built.stages()) nn::set_products(stage.model->root().module(), products);
  train::PipelineRunner runner(built.stages(), meshes.pp, device());
  const Batch batch = random_batch(llama, 1);
  const auto micro_batches = micro_batches_of(batch, kMicroBatches);
  const train::StepPlan plan = runner.plan(built.schedule(), boundaries_of(llama, kFloat32, variant, 1));
  runner.run(plan, micro_batches, batch.num_valid());  // allocates the gradients
  products->multiplications = 0;
  const MemoryMeter meter(device().type());
  runner.run(plan, micro_batches, batch.num_valid());
  return {static_cast<double>(meter.peak()), products->multiplications,
          pipeline::simulate(built.schedule()).ranks[static_cast<size_t>(meshes.pp.rank())],
          held_at_most(built.schedule(), meshes.pp.rank())};
}

// The bytes of one micro-batch that wait for its backward, with its input, if each rank has one stage:
// measured on this rank's stage without a runner or schedule.
double bytes_of_micro_batch() {
  const LlamaCase llama = model();
  const Variant variant{{.pp = world().size()}, "GPipe", world().size(), kMicroBatches};
  const train::Meshes meshes = train::build_meshes(world(), variant.dims);
  const Stages built(llama, kFloat32, variant, meshes, {.ends = {.first = 0, .last = 0}});
  const train::Stage& stage = built.stages().front();
  const data::Batch batch = micro_batches_of(random_batch(llama, 1), kMicroBatches)[0];
  const auto forward = [&] {
    at::Tensor input = batch.input_BS.to(device());
    if (stage.index > 0) {
      const train::TensorType type = boundaries_of(llama, kFloat32, variant, 1)[0];
      input = at::zeros(type.sizes, options_of(type.dtype)).requires_grad_();
    }
    const bool last = stage.index + 1 == variant.stages;
    return (last ? stage.model->loss(input, batch.labels_BS.to(device()), batch.valid_tokens)
                 : stage.model->hidden(input))
        .grad_fn();
  };
  forward();  // allocates the gradients that the loss head sums
  const MemoryMeter meter(device().type());
  const auto graph = forward();
  return static_cast<double>(meter.bytes());
}

// Prints values in micro-batches, for each rank.
void print_row(std::string_view schedule, double peak, double simulated, double held) {
  char mine[64];
  std::snprintf(mine, sizeof mine, "%.2f (%.2f, %.2f)", peak, simulated, held);
  std::string row = std::string(schedule) + ", peak (simulated, with what W waits for) by rank:";
  for (const std::string& each : world().everyone()->all_gather_text(mine, {.phase = "test::peak"}))
    row += " " + each;
  if (world().rank() == 0) std::puts(row.c_str());
}

// The simulator counts activations between I and W as whole; with their actual size the bound is narrower.
// Beyond the schedule's micro-batches, a rank has only the temporary memory of a layer's backward. It is most in
// SwiGLU's, which makes its output again beside both gradients, and less than the smallest part that a stage could hold
// for too long, which is two layers.
TEST(PipelineMemory, MatchesTheSimulator) {
  const double whole = bytes_of_micro_batch();
  const double layer = whole * world().size() / kLayers;
  for (const pipeline::ScheduleTraits& traits : pipeline::all_schedule_traits()) {
    const int stages = pipeline::default_num_stages(traits, world().size());
    const Measured measured = run(traits.name, stages);
    const double of_stage = whole * world().size() / stages;
    const double expected = of_stage * measured.simulated.peak_live, held = of_stage * measured.held;
    EXPECT_LE(measured.peak_bytes, 1.15 * expected + layer) << traits.name;
    EXPECT_LE(measured.peak_bytes, 1.04 * held + 1.5 * layer) << traits.name;
    EXPECT_GE(measured.peak_bytes, 0.95 * expected) << traits.name;
    print_row(traits.name, measured.peak_bytes / whole, expected / whole, held / whole);
  }
}

// Qi et al. 2024: ZB-V needs no more than 1F1B's first rank.
TEST(PipelineMemory, ZeroBubbleOnAVNeedsNoMoreThan1F1B) {
  const auto largest = [](const Measured& measured) {
    return world().everyone()->max(measured.peak_bytes, {.phase = "test::peak"});
  };
  EXPECT_LE(largest(run("ZBVZeroBubble", 2 * world().size())), 1.2 * largest(run("1F1B", world().size())));
}

// Summed over all ranks, because a loop and a V give ranks different stages.
int64_t multiplications_of(std::string_view schedule, size_t checkpointing) {
  const Measured measured = run(schedule, 2 * world().size(), checkpointing);
  return world().everyone()->sum(measured.multiplications, {.phase = "test::multiplications"});
}

// By default with the last kind of checkpointing alone.
TEST(PipelineWork, SplitBackwardsComputeNothingTwice) {
  const size_t first = testing::all_cases() ? 0 : std::size(kCheckpointing) - 1;
  for (size_t checkpointing = first; checkpointing < std::size(kCheckpointing); ++checkpointing) {
    const int64_t whole = multiplications_of("Interleaved1F1B", checkpointing);
    EXPECT_GT(whole, 0);
    for (const pipeline::ScheduleTraits& traits : pipeline::all_schedule_traits())
      if (traits.splits_backward)
        EXPECT_EQ(multiplications_of(traits.name, checkpointing), whole)
            << traits.name << " checkpointing " << kCheckpointing[checkpointing].name;
  }
}

}  // namespace
}  // namespace titan
