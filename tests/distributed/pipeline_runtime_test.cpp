// Compares stages unlike a Llama's on two pipeline ranks with the same products on one rank: frozen stages,
// stages without parameters, stages that don't use their input, and stages whose backward reads a sent
// tensor. Also checks that sent tensors are freed.

#include <algorithm>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "distributed/small_stages.h"
#include "distributed/world.h"
#include "titan/parallel/pipeline_schedule.h"
#include "titan/train/parallel_dims.h"
#include "train/pipeline/pipeline_runner.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names

pipeline::Schedule schedule_of(const std::string& name, size_t num_stages, int count) {
  return pipeline::with_parameter_actions(
      pipeline::with_communication(pipeline::make_schedule(name, 2, static_cast<int>(num_stages), count)));
}

void expect_equals_one_rank(const char* schedule, const std::vector<StageKind>& kinds) {
  expect_equals_one_rank(train::build_meshes(world(), {.pp = 2}).pp, schedule_of(schedule, kinds.size(), 4),
                         kinds);
}

TEST(PipelineRuntime, StagesOfAnyKindMatchOneRank) {
  using enum StageKind;
  for (const std::vector<StageKind>& kinds : {std::vector{Tanh, Product},
                                              {Frozen, Product},
                                              {Product, Frozen},
                                              {Identity, Product},
                                              {Product, Identity},
                                              {Product, IgnoresInput}})
    expect_equals_one_rank("1F1B", kinds);
  for (const std::vector<StageKind>& kinds : {std::vector{Product, Tanh, Tanh, Product},
                                              {Frozen, Product, Identity, Tanh},
                                              {Tanh, IgnoresInput, Frozen, Product},
                                              {Product, Identity, Frozen, Frozen}}) {
    expect_equals_one_rank("ZBVZeroBubble", kinds);
    expect_equals_one_rank("Interleaved1F1B", kinds);
  }
}

// gloo doesn't report that a message has arrived unless it is waited for, and the host is far ahead of a GPU.
TEST(PipelineRuntime, FreesSentTensorsDuringTheStep) {
  constexpr int kMany = 32;
  const DeviceMesh pp = train::build_meshes(world(), {.pp = 2}).pp;
  SmallStage stage(StageKind::Product, pp.rank());
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> outputs;
  size_t most = 0;
  stage.watch = [&](const at::Tensor& output) {
    const auto alive =
        std::count_if(outputs.begin(), outputs.end(), [](const auto& o) { return !o.expired(); });
    most = std::max(most, static_cast<size_t>(alive));
    outputs.push_back(output.storage().getWeakStorageImpl());
  };
  train::PipelineRunner runner({{&stage, pp.rank()}}, pp, device());
  const train::StepPlan plan = runner.plan(schedule_of("GPipe", 2, kMany),
                                           std::vector<train::TensorType>(2, {{1, kDim}, at::kDouble}));
  runner.run(plan, micro_batches(kMany), 1);
  ASSERT_EQ(outputs.size(), size_t{kMany});
  if (pp.rank() == 0) EXPECT_LE(most, 6u);
}

}  // namespace
}  // namespace titan
