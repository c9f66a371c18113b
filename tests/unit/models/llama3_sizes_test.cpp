#include <gtest/gtest.h>

#include "titan/models/llama3.h"

namespace titan::models {
namespace {

const Llama3Args& flavor(const std::string& name) { return llama3_flavors().at(name); }

TEST(Llama3Sizes, CountParametersAsPublished) {
  const std::map<std::string, int64_t> expected{{"debugmodel", 6'163'712}, {"1B", 1'235'814'400},
                                                {"3B", 3'212'749'824},     {"8B", 8'030'261'248},
                                                {"70B", 70'553'706'496},   {"405B", 405'853'388'800}};
  ASSERT_EQ(llama3_flavors().size(), expected.size());
  for (const auto& [name, count] : expected) EXPECT_EQ(num_params(flavor(name)), count) << name;
}

TEST(Llama3Sizes, RoundTheFeedForwardAsPublished) {
  const std::map<std::string, int64_t> expected{{"debugmodel", 768}, {"1B", 8192},   {"3B", 8192},
                                                {"8B", 14336},       {"70B", 28672}, {"405B", 53248}};
  for (const auto& [name, hidden] : expected) EXPECT_EQ(flavor(name).ffn_hidden_dim(), hidden) << name;
}

TEST(Llama3Sizes, CountFlopsAsTorchTitan) {
  EXPECT_EQ(flops_per_token(flavor("debugmodel"), 2048), 71'585'280.0);
  EXPECT_EQ(flops_per_token(flavor("debugmodel"), 8192), 184'831'488.0);
  EXPECT_EQ(flops_per_token(flavor("8B"), 2048), 48'250'773'504.0);
  EXPECT_EQ(flops_per_token(flavor("8B"), 8192), 57'914'449'920.0);
  EXPECT_EQ(flops_per_token(flavor("70B"), 2048), 433'124'327'424.0);
  EXPECT_EQ(flops_per_token(flavor("70B"), 8192), 481'442'709'504.0);
  EXPECT_EQ(flops_per_token(flavor("405B"), 2048), 2'473'246'556'160.0);
  EXPECT_EQ(flops_per_token(flavor("405B"), 8192), 2'625'449'459'712.0);
}

TEST(Llama3Sizes, ATiedMatrixCountsOnceButItsFlopsStay) {
  Llama3Args args = flavor("debugmodel");
  const double untied = flops_per_token(args, 128);
  args.tie_embeddings = true;
  EXPECT_EQ(num_params(args), 6'163'712 - 2048 * 256);
  EXPECT_EQ(flops_per_token(args, 128), untied);
}

TEST(Llama3Sizes, CheckReportsImpossibleSizes) {
  for (const auto& [name, args] : llama3_flavors()) {
    std::vector<std::string> problems;
    check(args, problems);
    EXPECT_TRUE(problems.empty()) << name << ": " << problems[0];
  }
  std::vector<std::string> problems;
  check({.dim = 30, .n_heads = 4, .n_kv_heads = 3, .rope_scaling = {.low_freq_factor = 4}}, problems);
  EXPECT_EQ(problems.size(), 4u);
}

}  // namespace
}  // namespace titan::models
