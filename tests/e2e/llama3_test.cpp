// The README's first command, shortened: Llama 3 on real text over two ranks.

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "e2e/training.h"

namespace titan::testing {
namespace {

Words debug_config() {
  return {source_file("configs/llama3_debug.toml"), "--model.hf_assets_path",
          source_file("assets/tokenizer")};
}

// The share of a step that waits for data: the median over the steps after the first, which starts the
// threads.
double waiting_for_data(const std::filesystem::path& folder) {
  std::ifstream file(folder / "metrics.jsonl");
  std::vector<double> shares;
  for (std::string line; std::getline(file, line);) {
    auto object = nlohmann::json::parse(line);
    if (object.at("step") > 1)
      shares.push_back(object.at("data_loading_s").get<double>() / object.at("step_s").get<double>());
  }
  std::nth_element(shares.begin(), shares.begin() + shares.size() / 2, shares.end());
  return shares.at(shares.size() / 2);
}

TEST(Llama3Debug, LossFallsOnTwoRanksWithoutWaitingForData) {
  auto folder = fresh_folder("run");
  auto steps = train(folder, debug_config() + Words{"--nproc", "2", "--training.steps", "12"});
  ASSERT_EQ(steps.size(), 12u);
  EXPECT_NEAR(steps.front().loss, 7.8, 0.5);  // ln 2048 = 7.62, plus a little for unequal initial logits
  EXPECT_LT(steps.back().loss, steps.front().loss - 1);
  EXPECT_LT(waiting_for_data(folder), 0.01);
}

// The results of a run: losses, norms and the model's file.
struct Outcome {
  std::vector<double> numbers;
  std::string weights;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

Outcome outcome_of(const std::string& name, const Words& words) {
  auto folder = fresh_folder(name);
  auto steps = train(
      folder,
      debug_config() + words +
          Words{"--nproc", "2", "--training.steps", "4", "--training.seq_len", "64", "--checkpoint.enable",
                "--checkpoint.last_save_model_only", "--training.mixed_precision_param", "bfloat16"},
      /*limit_s=*/100, /*threads=*/2);
  Outcome outcome;
  for (const Logged& step : steps) outcome.numbers.insert(outcome.numbers.end(), {step.loss, step.grad_norm});
  std::ostringstream weights;
  weights << std::ifstream(folder / "checkpoint/step-4/model.safetensors", std::ios::binary).rdbuf();
  outcome.weights = weights.str();
  return outcome;
}

// Two threads a rank: how work is divided among them must not change results.
TEST(Llama3Debug, TwoRunsAreBitEqual) {
  const Outcome first = outcome_of("first", {"--debug.deterministic"});
  EXPECT_EQ(first.numbers.size(), 8u);
  EXPECT_GT(first.weights.size(), 1u << 20);
  EXPECT_TRUE(outcome_of("warn_only", {"--debug.deterministic", "--debug.deterministic_warn_only"}) == first);
  if (tests_on_gpu()) return;
  // On the CPU the kernels are deterministic by default.
  EXPECT_TRUE(outcome_of("default", {}) == first);
}

// One rank in bfloat16 keeps a cast of its weights, which has to follow the optimizer.
TEST(Llama3Debug, LossFallsOnOneRank) {
  for (const char* implementation : {"fused", "foreach"}) {
    auto steps = train(fresh_folder(implementation),
                       debug_config() + Words{"--training.steps", "8", "--training.seq_len", "64",
                                              "--optimizer.implementation", implementation});
    ASSERT_EQ(steps.size(), 8u);
    EXPECT_LT(steps.back().loss, steps.front().loss - 0.5) << implementation;
  }
}

TEST(Llama3Debug, ReferenceKernelsGiveTheSameLosses) {
  const auto run = [](const char* kernels) {
    return train(fresh_folder(kernels), debug_config() + Words{"--training.steps", "4", "--training.seq_len",
                                                               "64", "--training.mixed_precision_param",
                                                               "float32", "--ops.kernels", kernels});
  };
  const auto own = run("auto"), reference = run("reference");
  ASSERT_EQ(own.size(), 4u);
  ASSERT_EQ(reference.size(), 4u);
  bool all_equal = true;
  for (size_t i = 0; i < own.size(); ++i) {
    EXPECT_NEAR(reference[i].loss, own[i].loss, 2e-5);
    EXPECT_NEAR(reference[i].grad_norm, own[i].grad_norm, 1e-4);
    all_equal = all_equal && reference[i].grad_norm == own[i].grad_norm;
  }
  EXPECT_FALSE(all_equal) << "the kernels' roundings differ a little";
}

TEST(Llama3Debug, PresetsAreAccepted) {
  for (const char* name : {"llama3_debug", "llama3_8b", "llama3_70b", "llama3_405b"}) {
    CommandResult result =
        try_train({source_file(std::string("configs/") + name + ".toml"), "--print-config"});
    EXPECT_EQ(result.status, 0) << name << ": " << result.err;
  }
}

}  // namespace
}  // namespace titan::testing
