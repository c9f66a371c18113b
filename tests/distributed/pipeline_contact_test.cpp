// Every schedule on ranks that have never sent each other anything. NCCL connects two ranks of a communicator
// when one first sends to the other, and blocks both hosts until then.

#include <dlfcn.h>

#include <gtest/gtest.h>

#include <set>
#include <string_view>

#include "dist/stream.h"
#include "distributed/small_stages.h"
#include "distributed/unconnected_world.h"
#include "titan/parallel/pipeline_schedule.h"
#include "titan/train/parallel_dims.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names

class PipelineContact : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(PipelineContact, RunsAndEqualsOneRank) {
  const auto& [name, num_micro_batches] = GetParam();
  const int pp = world().size(),
            num_stages = pipeline::default_num_stages(pipeline::schedule_traits(name), pp);
  if (const auto why =
          pipeline::counts_problem(pipeline::schedule_traits(name), pp, num_stages, num_micro_batches))
    GTEST_SKIP() << *why;
  const auto schedule = pipeline::with_parameter_actions(
      pipeline::with_communication(pipeline::make_schedule(name, pp, num_stages, num_micro_batches)));
  std::vector<StageKind> kinds(static_cast<size_t>(num_stages), StageKind::Tanh);
  kinds.back() = StageKind::Product;
  // With VIRTUAL_GPU_LAZY_LOADING. Which kernels a step launches for the first time depends on shapes, so in the first step each launch counts. When links
  // connect only first launches do: the probe computes beside a receive, by a kernel that it has launched before.
  const auto load = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "virtual_gpu_load_at_each_launch"));
  const dist::World fresh(unconnected_world(str("contact/", name, "/", num_micro_batches)));
  expect_equals_one_rank(train::build_meshes(fresh, {.pp = pp}).pp, schedule, kinds, [&](bool in_first_step) {
    if (load) load(in_first_step);
  });
}

TEST(PipelineLaunches, AreRefusedIfTheyBlock) {
  if (world().backend() != "nccl") GTEST_SKIP() << "messages through the host don't block";
  const dist::World fresh(unconnected_world("blocking"));
  pipeline::Links links(train::build_meshes(fresh, {.pp = world().size()}).pp);
  setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  EXPECT_THROW(links.connect(pipeline::make_schedule("GPipe", world().size(), world().size(), 1)),
               ConfigError);
  unsetenv("CUDA_LAUNCH_BLOCKING");
}

// Before any schedule runs, so that no order of a schedule's messages can wait for NCCL's connections.
TEST(PipelineLinks, CarryAFirstMessageAndAProbeWhenTheyAreMade) {
  const auto impl = unconnected_world("first messages");
  const dist::World fresh(impl);
  const DeviceMesh pp = train::build_meshes(fresh, {.pp = world().size()}).pp;
  pipeline::Links links(pp);
  links.connect(pipeline::make_schedule("Interleaved1F1B", pp.size(), 2 * pp.size(), 2 * pp.size()));
  const int next = (pp.rank() + 1) % pp.size(), previous = (pp.rank() + pp.size() - 1) % pp.size();
  std::set<dist::Group*> expected;
  for (const int peer : {next, previous})
    expected.insert({links.to(peer).group.get(), links.from(peer).group.get()});
  std::multiset<std::string> names, contacted, probed;
  for (const dist::Group* group : expected) names.insert(group->name());
  for (const dist::CallRecord& call : impl->recorder->snapshot())
    if (call.phase == std::string_view("pp::first_message")) contacted.insert(call.group->name);
  for (const dist::CallRecord& call : impl->recorder->snapshot())
    if (call.phase == std::string_view("pp::probe")) probed.insert(call.group->name);
  EXPECT_EQ(contacted, names);
  EXPECT_EQ(probed, names);
  dist::Stream::current(fresh.device()).synchronize();  // a closed link drops the message on its way
  links.close();
}

// Counted by virtual GPUs. A receive that waits keeps its multiprocessors from computing.
TEST(PipelineLinks, TakeFewMultiprocessors) {
  const auto start = reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "virtual_gpu_start_counting"));
  const auto count = reinterpret_cast<uint64_t (*)(const char*, const char*, const char*)>(
      dlsym(RTLD_DEFAULT, "virtual_gpu_count"));
  if (!count || world().backend() != "nccl") GTEST_SKIP() << "runs on virtual GPUs, with --nccl";
  const dist::World fresh(unconnected_world("multiprocessors"));
  start();
  pipeline::Links links(train::build_meshes(fresh, {.pp = world().size()}).pp);
  links.connect(pipeline::make_schedule("GPipe", world().size(), world().size(), 1));
  const uint64_t limited = count("calls", nullptr, "communicator of at most 4 CTAs");
  EXPECT_GT(limited, 0u);
  EXPECT_EQ(limited, count("calls", nullptr, "communicator"));
}

INSTANTIATE_TEST_SUITE_P(Schedules, PipelineContact,
                         ::testing::Combine(::testing::ValuesIn(pipeline::schedule_names()),
                                            ::testing::Values(1, 2, 4, 7, 8, 12)),
                         [](const auto& info) {
                           return str(std::get<0>(info.param), "_", std::get<1>(info.param));
                         });

}  // namespace
}  // namespace titan
