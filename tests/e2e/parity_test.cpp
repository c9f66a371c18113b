// TorchTitan's own losses, from its weights and batches (tests/data/parity/README.md), and one rank's losses
// on every layout.

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "e2e/training.h"

namespace titan::testing {
namespace {

Words replay(const std::string& fixture) {
  std::string folder = source_file("tests/data/parity/" + fixture);
  return {folder + "/replay.toml", "--training.dataset_path", folder, "--checkpoint.initial_load_path",
          folder + "/titan.safetensors"};
}

std::vector<Logged> recorded(const std::string& fixture) {
  auto json =
      nlohmann::json::parse(std::ifstream(source_file("tests/data/parity/" + fixture + "/fixture.json")));
  std::vector<Logged> steps;
  for (const auto& step : json.at("steps"))
    steps.push_back({step.at("step"), step.at("loss"), step.at("grad_norm"), step.at("lr")});
  return steps;
}

void expect_near(const std::vector<Logged>& found, const std::vector<Logged>& expected,
                 double loss_tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(found[i].loss, expected[i].loss, loss_tolerance) << "step " << i + 1;
    EXPECT_NEAR(found[i].grad_norm, expected[i].grad_norm, 1e-4 * expected[i].grad_norm) << "step " << i + 1;
    EXPECT_NEAR(found[i].lr, expected[i].lr, 1e-12) << "step " << i + 1;
  }
}

class Parity : public ::testing::TestWithParam<const char*> {};

TEST_P(Parity, OneRankGivesTorchTitansLosses) {
  expect_near(train(fresh_folder("run"), replay(GetParam())), recorded(GetParam()), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, Parity, ::testing::Values("mini", "mini8"),
                         [](const auto& info) { return std::string(info.param); });

struct Layout {
  const char* name;
  Words words;
};

class Layouts : public ::testing::TestWithParam<Layout> {};

TEST_P(Layouts, GiveOneRanksLosses) {
  auto one = train(fresh_folder("one"), replay("mini"));
  auto other = train(fresh_folder("other"), replay("mini") + GetParam().words);
  expect_near(other, one, 5e-6);
}

INSTANTIATE_TEST_SUITE_P(
    All, Layouts,
    ::testing::Values(Layout{"Fsdp2", {"--nproc", "2", "--training.local_batch_size", "2"}},
                      // Four rows over three ranks: two of them have a row that doesn't count.
                      Layout{"Fsdp3", {"--nproc", "3", "--training.local_batch_size", "2"}},
                      Layout{"Fsdp4", {"--nproc", "4", "--training.local_batch_size", "1"}},
                      Layout{"Fsdp2ReshardNever",
                             {"--nproc", "2", "--training.local_batch_size", "2",
                              "--parallelism.fsdp_reshard_after_forward", "never"}},
                      Layout{"Fsdp4ReshardTo2",
                             {"--nproc", "4", "--training.local_batch_size", "1",
                              "--parallelism.fsdp_reshard_after_forward", "2"}},
                      Layout{"Hsdp2x2",
                             {"--nproc", "4", "--training.local_batch_size", "1",
                              "--parallelism.data_parallel_replicate_degree", "2"}},
                      Layout{"Ddp2",
                             {"--nproc", "2", "--training.local_batch_size", "2",
                              "--parallelism.data_parallel_replicate_degree", "2",
                              "--parallelism.data_parallel_shard_degree", "1"}},
                      Layout{"Accumulation4", {"--training.local_batch_size", "1"}},
                      Layout{"Fsdp2Accumulation2", {"--nproc", "2", "--training.local_batch_size", "1"}},
                      Layout{"Fsdp2AccumulationReducedOnce",
                             {"--nproc", "2", "--training.local_batch_size", "1",
                              "--parallelism.no_fsdp_reduce_every_micro_batch"}}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace titan::testing
