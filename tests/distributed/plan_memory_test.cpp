// The memory that `titan plan --device cpu` tells, beside the tensors of the same job.

#include <cmath>
#include <cstdio>

#include <gtest/gtest.h>

#include "distributed/world.h"
#include "job/rehearsal.h"
#include "memory_meter.h"
#include "plan_of.h"
#include "titan/nn/layers.h"
#include "unit/job/load_preset.h"

namespace titan::train {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names
using nlohmann::json;

// Large enough that a plan's blocks of whole 512 bytes don't matter.
const Words kModel = {"--model.args.dim=512", "--training.seq_len=512"};
const Words kTwoRows = {"--training.local_batch_size=2"};
const Words kPipeline = {"--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=8"};
const Words kTensor = {"--parallelism.tensor_parallel_degree=2"};
const Words kContext = {"--parallelism.context_parallel_degree=2"};
const Words kReplicas = {"--parallelism.data_parallel_replicate_degree=2"};
const Words kFloat8 = {"--model.converters=quantize.linear.float8", "--quantize.linear.float8.emulate"};
Words schedule(const std::string& name) { return {"--parallelism.pipeline_parallel_schedule=" + name}; }

struct Layout {
  const char* name;
  int world_size;
  Words words;
};
void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name; }

class PlanMemory : public ::testing::TestWithParam<Layout> {};

TEST_P(PlanMemory, IsThatOfARun) {
  const Layout& layout = GetParam();
  if (world().size() != layout.world_size) GTEST_SKIP() << "runs on " << layout.world_size << " ranks";
  const Words words = kModel + layout.words;
  std::string text;
  try {
    if (world().rank() == 0)
      text = plan_of("llama3_debug", world().size(), words + Words{"--device", "cpu"}).dump();
  } catch (const Error& error) {
    ADD_FAILURE() << error.what();  // the other ranks wait for a text
  }
  text = world().everyone()->all_gather_text(text, {.phase = "test::plan"})[0];
  ASSERT_FALSE(text.empty());
  const json plan = json::parse(text);

  const JobConfig config =
      load_preset("llama3_debug", world().size(), words + Words{"--training.device=cpu"});
  const MemoryMeter meter;
  Rehearsal training(config, world());
  for (int step = 0; step < 2; ++step) training.step();

  constexpr double mib = 1 << 20;
  const double measured = static_cast<double>(meter.peak()) / mib,
               planned = planned_memory(plan, world().rank()).at("peak_allocated_bytes").get<double>() / mib;
  std::printf("rank %d, %s: %.1f MiB, planned %.1f (%+.2f %%)\n", world().rank(), layout.name, measured,
              planned, 100 * (planned / measured - 1));
  EXPECT_LE(planned, 1.015 * measured);
  EXPECT_GE(planned, measured / 1.015);
}

INSTANTIATE_TEST_SUITE_P(
    All, PlanMemory,
    ::testing::Values(
        Layout{"OneRank", 1, kTwoRows},
        Layout{"Fp32", 1, kTwoRows + Words{"--training.mixed_precision_param=float32"}},
        Layout{"SelectiveRecompute", 1, kTwoRows + Words{"--activation_checkpoint.mode=selective"}},
        Layout{"FullRecompute", 1, kTwoRows + Words{"--activation_checkpoint.mode=full"}},
        Layout{"Accumulates", 1, kTwoRows + Words{"--training.global_batch_size=8"}},
        Layout{"Bfloat16States", 1, kTwoRows + Words{"--optimizer.state_dtype=bfloat16"}},
        Layout{"TiedEmbeddings", 1, kTwoRows + Words{"--model.args.tie_embeddings=true"}},
        Layout{"Float8", 1, kTwoRows + kFloat8},
        Layout{"Float8Rowwise", 1,
               kTwoRows + kFloat8 + Words{"--quantize.linear.float8.recipe_name=rowwise"}},
        Layout{"Fsdp", 2, kTwoRows},
        Layout{"FsdpNeverResharded", 2, kTwoRows + Words{"--parallelism.fsdp_reshard_after_forward=never"}},
        Layout{"Ddp", 2,
               kTwoRows + Words{"--parallelism.data_parallel_replicate_degree=2",
                                "--parallelism.data_parallel_shard_degree=1"}},
        Layout{"Tensor", 2, kTwoRows + kTensor},
        Layout{"AsyncTensor", 2, kTwoRows + kTensor + Words{"--parallelism.enable_async_tensor_parallel"}},
        Layout{"TensorWithWholeSequences", 2,
               kTwoRows + kTensor + Words{"--parallelism.no_enable_sequence_parallel"}},
        Layout{"TensorWithWholeLogits", 2, kTwoRows + kTensor + Words{"--parallelism.disable_loss_parallel"}},
        Layout{"Float8Tensor", 2, kTwoRows + kTensor + kFloat8}, Layout{"Context", 2, kTwoRows + kContext},
        Layout{"ContextAllToAll", 2,
               kTwoRows + kContext + Words{"--parallelism.context_parallel_rotate_method=alltoall"}},
        Layout{"ContextWithAllKeys", 2,
               kTwoRows + kContext + Words{"--parallelism.context_parallel_attention=allgather_kv"}},
        Layout{"Float8Fsdp", 2, kTwoRows + kFloat8}, Layout{"Pipeline", 2, kPipeline},
        Layout{"Float8Pipeline", 2, kPipeline + kFloat8},
        Layout{"GpipePipeline", 2, kPipeline + schedule("GPipe")},
        Layout{"BreadthFirstPipeline", 2, kPipeline + schedule("LoopedBFS")},
        Layout{"InterleavedPipeline", 2, kPipeline + schedule("Interleaved1F1B")},
        Layout{"ZeroBubblePipeline", 2, kPipeline + schedule("InterleavedZeroBubble")},
        Layout{"VPipeline", 2, kPipeline + schedule("ZBVZeroBubble")},
        Layout{"DualPipeline", 2, kPipeline + schedule("DualPipeV")}, Layout{"FsdpOf4", 4, kTwoRows},
        Layout{"Hsdp", 4, kTwoRows + kReplicas},
        Layout{"ReplicatedTensor", 4, kTwoRows + kReplicas + kTensor},
        Layout{"ReplicatedContext", 4, kTwoRows + kReplicas + kContext},
        Layout{"TensorContext", 4, kTwoRows + kTensor + kContext},
        Layout{"ReplicatedPipeline", 4, kPipeline + kReplicas}, Layout{"FsdpTensor", 4, kTwoRows + kTensor},
        Layout{"FsdpContext", 4, kTwoRows + kContext}, Layout{"FsdpPipeline", 4, kPipeline},
        Layout{"PipelineOf4", 4, kPipeline + Words{"--parallelism.pipeline_parallel_degree=4"}},
        Layout{"TensorPipeline", 4, kPipeline + kTensor}, Layout{"ContextPipeline", 4, kPipeline + kContext}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace titan::train
