// `titan train` with attention within documents: PyTorch's losses with TorchTitan's mask, one rank's losses on other
// layouts, validation with the mask, and what is refused.

#include <algorithm>
#include <cmath>

#include "e2e/small_run.h"

namespace titan::testing {
namespace {

// The batches and weights of TorchTitan's recorded run, whose most frequent token ends documents here.
Words replay_with_masks() {
  const std::string folder = source_file("tests/data/parity/mini");
  return {folder + "/replay.toml",
          "--training.dataset_path",
          folder,
          "--checkpoint.initial_load_path",
          folder + "/titan.safetensors",
          "--model.args.attn_mask_type",
          "block_causal",
          "--model.args.eos_id",
          "0"};
}

// scripts/make_document_golden.py
std::vector<Logged> golden() {
  const auto record = nlohmann::json::parse(std::ifstream(source_file("tests/data/golden/documents.json")));
  std::vector<Logged> steps;
  for (const auto& step : record.at("steps"))
    steps.push_back({step.at("step"), step.at("loss"), step.at("grad_norm"), step.at("lr")});
  return steps;
}

void expect_near_golden(const std::vector<Logged>& found, const std::vector<Logged>& expected,
                        double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(found[i].loss, expected[i].loss, tolerance) << "step " << i + 1;
    EXPECT_NEAR(found[i].grad_norm, expected[i].grad_norm, 1e-4 * expected[i].grad_norm) << "step " << i + 1;
  }
}

TEST(DocumentMask, MatchesPyTorchWithTorchTitansMask) {
  expect_near_golden(train(fresh_folder("run"), replay_with_masks()), golden(), 1e-5);
}

struct MaskLayout {
  const char* name;
  Words words;
};
void PrintTo(const MaskLayout& layout, std::ostream* out) { *out << layout.name; }

class DocumentMaskLayouts : public ::testing::TestWithParam<MaskLayout> {};

TEST_P(DocumentMaskLayouts, HaveTheSameLosses) {
  expect_near_golden(train(fresh_folder("run"), replay_with_masks() + GetParam().words), golden(), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(
    All, DocumentMaskLayouts,
    ::testing::Values(MaskLayout{"Fsdp2", {"--nproc", "2", "--training.local_batch_size", "2"}},
                      MaskLayout{"Tp2", {"--nproc", "2", "--parallelism.tensor_parallel_degree", "2"}},
                      // Micro-batches of two rows, of which each stage knows the documents.
                      MaskLayout{"Pp2",
                                 {"--nproc", "2", "--parallelism.pipeline_parallel_degree", "2",
                                  "--parallelism.pipeline_parallel_microbatch_size", "2"}},
                      MaskLayout{"Accumulation4", {"--training.local_batch_size", "1"}},
                      MaskLayout{"Recomputed", {"--activation_checkpoint.mode", "full"}},
                      MaskLayout{"RecomputedByOp",
                                 {"--activation_checkpoint.mode", "selective",
                                  "--activation_checkpoint.selective_ac_option", "op"}},
                      MaskLayout{"ReferenceKernels", {"--ops.kernels", "reference"}}),
    [](const auto& info) { return std::string(info.param.name); });

// ---- short documents of text

Words short_documents(const std::filesystem::path& folder) {
  std::ofstream documents(folder / "documents.jsonl");
  for (int i = 0; i < 200; ++i)
    documents << nlohmann::json{{"text", std::string(static_cast<size_t>(3 + i % 17),
                                                     static_cast<char>('a' + i % 26))}}
              << "\n";
  const std::string file = (folder / "documents.jsonl").string();
  return small_run(folder) + Words{"--training.dataset",   "jsonl", "--training.dataset_path",       file,
                                   "--validation.dataset", "jsonl", "--validation.dataset_path",     file,
                                   "--validation.steps",   "2",     "--validation.local_batch_size", "4"};
}

const Words kMask = {"--model.args.attn_mask_type", "block_causal"};

std::vector<double> validation_losses(const std::filesystem::path& run) {
  std::vector<double> losses;
  for (const auto& line : read_lines(run / "validation.jsonl")) losses.push_back(line.at("loss"));
  return losses;
}

// The learning rate leaves the weights alone, so that only the validation's own mask can change its losses.
TEST(DocumentMask, IsThatOfTheValidationToo) {
  const Words run = short_documents(fresh_folder("config")) + Words{"--optimizer.lr", "1e-30"};
  const auto causal = fresh_folder("causal"), masked = fresh_folder("masked"),
             spread = fresh_folder("spread");
  train(causal, run);
  train(masked, run + kMask);
  train(spread,
        run + kMask +
            Words{"--nproc", "2", "--training.local_batch_size", "2", "--validation.local_batch_size", "2"});
  const auto without = validation_losses(causal), with = validation_losses(masked),
             over_ranks = validation_losses(spread);
  ASSERT_EQ(with.size(), 3u);
  ASSERT_EQ(without.size(), 3u);
  ASSERT_EQ(over_ranks.size(), 3u);
  for (size_t i = 0; i < with.size(); ++i) {
    EXPECT_GT(std::abs(with[i] - without[i]), 1e-4) << i;
    EXPECT_NEAR(over_ranks[i], with[i], 5e-6) << i;
  }
}

// In 16 bits, in which GPUs have a kernel for documents.
TEST(DocumentMask, TrainsIn16Bits) {
  const auto folder = fresh_folder("run");
  const CommandResult result =
      try_train(short_documents(fresh_folder("config")) + kMask +
                Words{"--training.mixed_precision_param", "bfloat16", "--training.steps", "20",
                      "--job.dump_folder", folder.string()});
  ASSERT_EQ(result.status, 0) << result.err;
  const std::vector<double> run = losses(read_metrics(folder));
  ASSERT_EQ(run.size(), 20u);
  EXPECT_LT(run.back(), run.front() - 0.2);
  if (tests_on_gpu())
    EXPECT_THAT(result.out + result.err,
                HasSubstr("heads of 16 features, within documents, uses LibTorch's FlashAttention"));
}

// ---- refusals, before any process computes

std::string mask_refusal(const Words& words) {
  const CommandResult result =
      try_train(words + Words{"--job.dump_folder", fresh_folder("refused").string()});
  EXPECT_NE(result.status, 0);
  return result.err;
}

TEST(DocumentMaskRefusals, SayWhy) {
  EXPECT_THAT(
      mask_refusal(replay_with_masks() + Words{"--nproc", "2", "--parallelism.context_parallel_degree", "2"}),
      HasSubstr("can't be combined with parallelism.context_parallel_degree = 2"));
  EXPECT_THAT(mask_refusal(replay_with_masks() + Words{"--compile.enable"}),
              HasSubstr("can't be combined with compile.enable"));
  EXPECT_THAT(mask_refusal(replay_with_masks() + Words{"--model.args.eos_id", "256"}),
              HasSubstr("eos_id 256 isn't one of the vocab_size = 256 tokens"));
  EXPECT_THAT(mask_refusal(replay_with_masks() + Words{"--model.args.attn_mask_type", "causal"}),
              HasSubstr("eos_id is read only with attn_mask_type = \"block_causal\""));
  EXPECT_THAT(mask_refusal(replay_with_masks() + Words{"--model.args.attn_mask_type", "sliding"}),
              HasSubstr("block_causal"));
  EXPECT_THAT(mask_refusal(replay_with_masks() + Words{"--model.flavor", "debugmodel_flex_attn"}),
              HasSubstr("use \"debugmodel\" with model.args.attn_mask_type = \"block_causal\""));
}

TEST(DocumentMaskRefusals, NameTheTokenThatIsMissing) {
  Words words = replay_with_masks();
  words.resize(words.size() - 2);  // without eos_id
  EXPECT_THAT(mask_refusal(words),
              HasSubstr("token ids in files come without a tokenizer; set model.args.eos_id"));
}

}  // namespace
}  // namespace titan::testing
