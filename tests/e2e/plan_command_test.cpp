// titan plan as a user runs it: real configs, no GPU.

#include <sys/resource.h>

#include <fstream>

#include <gtest/gtest.h>

#include "e2e/training.h"

namespace titan::testing {
namespace {

using nlohmann::json;

CommandResult plan(const std::string& config, int world_size, const Words& words = {}, double limit_s = 300) {
  const std::string file = std::string(TITAN_SOURCE_DIR) + "/configs/" + config + ".toml";
  return run(Words{titan_program(), "plan", file, "--world", std::to_string(world_size)} + words, {},
             limit_s);
}

json plan_json(const std::string& config, int world_size, Words words = {}) {
  const CommandResult result = plan(config, world_size, Words{"--json"} + words);
  EXPECT_EQ(result.status, 0) << result.err;
  return result.status == 0 ? json::parse(result.out) : json();
}

// The largest of the children that have ended so far.
double peak_gb_of_children() {
  rusage usage{};
  ::getrusage(RUSAGE_CHILDREN, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024 / 1e9;
}

TEST(PlanCommand, TellsWhatARecipeTakes) {
  const json found = plan_json("llama3_8b", 8);
  EXPECT_EQ(found.at("fits"), true);
  EXPECT_NEAR(found.at("memory").at("peak_gib"), 35, 1);
  ASSERT_EQ(found.at("memory").at("by_role").size(), 1U);
  const json& role = found.at("memory").at("by_role")[0];
  EXPECT_EQ(role.at("role"), "every rank");
  const json& categories = role.at("at_peak").at("categories");
  constexpr double shard = 8'030'261'248.0 * 4 / 8;
  EXPECT_NEAR(categories.at("parameters"), shard, 0.01 * shard);
  EXPECT_NEAR(categories.at("optimizer"), 2 * shard, 0.01 * 2 * shard);
  int64_t sum = 0;
  for (const auto& [name, bytes] : categories.items()) sum += bytes.get<int64_t>();
  EXPECT_EQ(sum, role.at("peak_allocated_bytes"));
  EXPECT_GT(role.at("over_time").size(), 50U);
}

// 34 groups are gathered in the forward, the blocks again in the backward, and each is reduced.
TEST(PlanCommand, CountsCollectivesAndFlops) {
  const json found = plan_json("llama3_8b", 8, {"--activation_checkpoint.mode=none"});
  int64_t gathers = 0, reductions = 0;
  for (const json& row : found.at("collectives")) {
    if (row.at("label") == "fsdp::all_gather") {
      gathers += row.at("calls").get<int64_t>();
      EXPECT_EQ(row.at("stream"), "fsdp gather");
      EXPECT_EQ(row.at("group_size"), 8);
    }
    if (row.at("op") == "reduce_scatter") reductions += row.at("calls").get<int64_t>();
  }
  EXPECT_EQ(gathers, 34 + 32);
  EXPECT_EQ(reductions, 34);
  double of_products = 0;
  for (const json& row : found.at("operations"))
    if (row.at("operation").get<std::string>().find("mm") != std::string::npos)
      of_products += row.at("flops").get<double>();
  constexpr double tokens = 8192, parameters_in_products = 8'030'261'248.0 - 128'256.0 * 4096;
  EXPECT_NEAR(of_products, 6 * tokens * parameters_in_products, 1e-4 * 6 * tokens * parameters_in_products);
}

TEST(PlanCommand, PlansEveryPipelineRank) {
  const json found = plan_json("llama3_405b_pp", 512, {"--model.args.n_layers=32"});
  ASSERT_GE(found.at("memory").at("by_role").size(), 16U);
  EXPECT_EQ(found.at("memory").at("by_role")[3].at("role"), "pipeline rank 3");
}

TEST(PlanCommand, PlansALargeModelInAMinuteAndTwoGigabytes) {
  const CommandResult result = plan("llama3_405b", 512);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("llama3 405B on 512 x NVIDIA H100 80GB HBM3: fits"));
  EXPECT_LT(result.elapsed_s, 60);
  EXPECT_LT(peak_gb_of_children(), 2);
}

TEST(PlanCommand, TakesNoLongerForMoreRanks) {
  const CommandResult few = plan("llama3_405b", 512), many = plan("llama3_405b", 16384);
  EXPECT_EQ(many.status, 0) << many.err;
  EXPECT_LT(many.elapsed_s, 3 * few.elapsed_s + 5);
}

TEST(PlanCommand, SaysByHowMuchAJobDoesNotFit) {
  const CommandResult result = plan("llama3_8b", 8, {"--training.local_batch_size=8"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("doesn't fit: "));
}

TEST(PlanCommand, TakesDevicesFromFiles) {
  EXPECT_THAT(plan("llama3_8b", 8, {"--device", "h200"}).out, HasSubstr("NVIDIA H200"));
  const auto folder = fresh_folder("plan");
  std::ofstream(folder / "small.toml")
      << "[device]\nname = \"Small\"\nmemory_gib = 16\ncompute_capability = 90\nmultiprocessors = 100\n";
  EXPECT_THAT(plan("llama3_8b", 8, {"--device", (folder / "small.toml").string()}).out,
              AllOf(HasSubstr("8 x Small"), HasSubstr("doesn't fit")));
}

void expect_refused(const CommandResult& result, const std::string& key) {
  EXPECT_EQ(result.status, 2) << result.out;
  EXPECT_THAT(result.err, HasSubstr(key));
}

TEST(PlanCommand, NamesTheKeyOfAWrongValue) {
  expect_refused(plan("llama3_8b", 6, {"--parallelism.tensor_parallel_degree=4"}),
                 "parallelism.data_parallel_shard_degree");
  expect_refused(plan("llama3_8b", 8, {"--device", "h1000"}),
                 "--device h1000: unknown device; known: a100, b200");
  expect_refused(plan("llama3_8b", 8, {"--device", "missing.toml"}), "there is no such file");
  expect_refused(plan("llama3_8b", 8, {"--training.enable_cpu_offload"}), "training.enable_cpu_offload");
  expect_refused(plan("llama3_8b", 8, {"--training.device=cpu"}), "training.device");
  expect_refused(plan("llama3_8b", 8, {"--compile.enable"}), "compile.enable");
  expect_refused(plan("llama3_8b", 8, {"--model.args.attn_mask_type=block_causal"}),
                 "model.args.attn_mask_type");
  expect_refused(run({titan_program(), "plan", std::string(TITAN_SOURCE_DIR) + "/configs/llama3_8b.toml"}),
                 "--world");
}

TEST(PlanCommand, NamesTheKeyOfAWrongDeviceFile) {
  const auto file = fresh_folder("plan") / "wrong.toml";
  const auto planned_with = [&](const std::string& lines) {
    std::ofstream(file) << "[device]\n" << lines;
    return plan("llama3_8b", 8, {"--device", file.string()});
  };
  const std::string rest = "name = \"x\"\nmultiprocessors = 132\n";
  expect_refused(planned_with(rest + "memory_gib = 80\n"), "device.compute_capability");
  expect_refused(planned_with(rest + "memory_gib = inf\ncompute_capability = 90\n"), "memory_gib");
  expect_refused(planned_with(rest + "memory_gib = 80\ncompute_capability = 9\n"), "compute_capability");
  expect_refused(planned_with(rest + "memory_gib = 80\ncompute_capability = 90\nnodes = 1\n"), "nodes");
}

}  // namespace
}  // namespace titan::testing
