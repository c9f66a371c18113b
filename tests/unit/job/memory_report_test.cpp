#include <gtest/gtest.h>
#include <algorithm>
#include <map>
#include <new>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "job/build.h"
#include "job/dry_run.h"
#include "memory_meter.h"
#include "titan/core/error.h"
#include "titan/models/llama3.h"
#include "titan/nn/containers.h"
#include "titan/parallel/parameters.h"
#include "unit/job/words.h"
#include "unit/train/toy_model.h"

namespace titan::train {
namespace {

class MemoryReportTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!model_specs().contains("llama3")) models::register_llama3();
  }

  static JobConfig config_of(const Words& words, int world_size) {
    Words all = {"--model.name",
                 "llama3",
                 "--model.flavor",
                 "debugmodel",
                 "--training.local_batch_size",
                 "4",
                 "--training.seq_len",
                 "4096",
                 "--training.device",
                 "cpu",
                 "--training.mixed_precision_param",
                 "float32"};
    all.insert(all.end(), words.begin(), words.end());
    JobConfig config;
    const auto origins = config::load(job_schema(), {"", all}, config);
    check_job(config, origins, world_size, JobFiles::Ignore);
    return config;
  }

  static MemoryReport report(const Words& words, int world_size = 1, int rank = 0) {
    const JobConfig config = config_of(words, world_size);
    return memory_report(config, world_size, rank, c10::Device(c10::kCPU));
  }

  static double owned(const MemoryReport& report, const std::string& name) {
    for (const MemoryOwner& owner : report.owners)
      if (owner.name == name) return owner.bytes;
    return 0;
  }
  /// The memory that a forward of the real model leaves for its backward, after a whole step.
  static double measured_activations(const Words& words) {
    const JobConfig config = config_of(words, 1);
    const dist::World world = dist::init({.backend = "fake"});
    const auto model = build_model(config, build_job_meshes(config, world), at::kCPU);
    materialize(model->root(), 1);
    const int64_t rows = config.training.local_batch_size, length = config.training.seq_len;
    const at::Tensor tokens = at::randint(100, {rows, length}, at::kLong);
    model->loss(tokens, tokens, tokens.numel()).backward();
    for (const Parameter& parameter : parameters(model->root()))
      at::Tensor(parameter.data.local).mutable_grad().reset();
    const testing::MemoryMeter meter;
    const at::Tensor loss = model->loss(tokens, tokens, tokens.numel());
    return static_cast<double>(meter.bytes());
  }

  static double saved(const MemoryReport& report, const std::string& setting) {
    for (const NamedBytes& saving : report.savings)
      if (saving.name == setting) return saving.bytes;
    return 0;
  }
};

TEST_F(MemoryReportTest, OneRankHoldsTheWholeState) {
  const MemoryReport all = report({});
  const double parameters = owned(all, "parameters");
  EXPECT_GT(parameters, 0);
  EXPECT_EQ(owned(all, "gradients"), parameters);
  EXPECT_EQ(owned(all, "optimizer state"), 2 * parameters);
  EXPECT_EQ(owned(all, "gathered parameters"), 0) << "fp32 on one rank computes with the shards themselves";
  EXPECT_TRUE(std::is_sorted(all.owners.begin(), all.owners.end(),
                             [](const auto& a, const auto& b) { return a.bytes > b.bytes; }));
}

TEST_F(MemoryReportTest, RanksShardTheStateAndGatherLayers) {
  const MemoryReport one = report({}), two = report({}, 2);
  EXPECT_NEAR(owned(two, "parameters"), owned(one, "parameters") / 2, owned(one, "parameters") / 20);
  EXPECT_GT(owned(two, "gathered parameters"), 0);
  EXPECT_LT(owned(two, "gathered parameters"), owned(one, "parameters"));
  const MemoryReport kept = report({"--parallelism.fsdp_reshard_after_forward", "never"}, 2);
  EXPECT_EQ(owned(kept, "gathered parameters"), owned(one, "parameters"));
}

TEST_F(MemoryReportTest, ActivationsGrowWithTheBatch) {
  const MemoryReport four = report({}), two = report({"--training.local_batch_size", "2"});
  EXPECT_NEAR(owned(four, "activations"), 2 * owned(two, "activations"), owned(four, "activations") / 50);
  EXPECT_NEAR(saved(four, "training.local_batch_size = 2"), owned(four, "activations") / 2, 1);
}

// Compares with the memory of the real model, with the setting and without it.
TEST_F(MemoryReportTest, PredictsWhatASettingSaves) {
  const Words small = {"--training.seq_len", "128", "--training.local_batch_size", "2"};
  const MemoryReport report_of_small = report(small);
  const double plain = measured_activations(small);
  EXPECT_NEAR(owned(report_of_small, "activations"), plain, plain / 20);
  for (const auto& [setting, words] : std::map<std::string, Words>{
           {"activation_checkpoint.mode = \"full\"", {"--activation_checkpoint.mode", "full"}},
           {"training.mixed_precision_param = \"bfloat16\"",
            {"--training.mixed_precision_param", "bfloat16"}},
           {"training.local_batch_size = 1", {"--training.local_batch_size", "1"}},
           {"training.seq_len = 64", {"--training.seq_len", "64"}}}) {
    const double saves = plain - measured_activations(small + words);
    EXPECT_NEAR(saved(report_of_small, setting), saves, saves / 20) << setting;
    EXPECT_EQ(saved(report(small + words), setting), 0) << setting;
  }
}

TEST_F(MemoryReportTest, SuggestsOnlySettingsThatPassTheirChecks) {
  const Words two_parts = {"--parallelism.context_parallel_degree", "2", "--training.seq_len", "4092"};
  const MemoryReport odd = report(two_parts, 2);  // 4,092 is four times 1,023
  EXPECT_EQ(saved(odd, "parallelism.context_parallel_degree = 4, on twice as many ranks"), 0);
  EXPECT_EQ(saved(odd, "training.seq_len = 2046"), 0);
  EXPECT_GT(saved(odd, "training.local_batch_size = 2"), 0);
  EXPECT_GT(saved(report({}), "parallelism.context_parallel_degree = 2, on twice as many ranks"), 0);
  EXPECT_GT(saved(report({}), "training.seq_len = 2048"), 0);
}

TEST_F(MemoryReportTest, TheFirstRankOfAPipelineHoldsMoreMicroBatches) {
  const Words pipeline = {"--parallelism.pipeline_parallel_degree", "2"};
  const auto words_of = [&](int rank) {
    const MemoryReport of_rank = report(pipeline, 2, rank);
    for (const MemoryOwner& owner : of_rank.owners)
      if (owner.name == "activations") return owner.details;
    return std::string("none");
  };
  EXPECT_EQ(words_of(0).substr(0, 2), "2 ") << words_of(0);
  EXPECT_EQ(words_of(1).substr(0, 2), "1 ") << words_of(1);
  EXPECT_NE(words_of(0).find("tok_embeddings"), std::string::npos) << words_of(0);
  EXPECT_EQ(words_of(1).find("tok_embeddings"), std::string::npos) << words_of(1);
}

/// A layer with a buffer of 40 bytes.
class BufferedImpl : public nn::Module, public nn::LayerSequence {
 public:
  explicit BufferedImpl(const nn::Construct& construct) : table(16, construct) {
    register_module("table", table);
    register_buffer("seen", at::zeros({5}, at::kLong));
    call_in_order({part("table", table)});
  }
  at::Tensor forward(const at::Tensor& tokens_BS) { return table(tokens_BS); }
  Bigram table;
};
TITAN_MODULE(Buffered);

class BufferedModel : public TrainableModel {
 public:
  explicit BufferedModel(const nn::Construct& construct) : model_(construct) {}
  nn::AnyRef root() override { return model_; }
  at::Tensor loss(const at::Tensor& tokens_BS, const at::Tensor& labels_BS,
                  const ops::ValidTokens& valid_tokens) override {
    return at::cross_entropy_loss(model_(tokens_BS).flatten(0, 1), labels_BS.flatten(), {},
                                  at::Reduction::Sum, -100) /
           valid_tokens;
  }

 private:
  Buffered model_;
};

// The rotation table has a row for each position of a sequence; it isn't sharded.
TEST_F(MemoryReportTest, IncludesBuffers) {
  constexpr double kTable = 4096 * 16 * sizeof(float);  // head_dim: 256 / 16 heads
  EXPECT_EQ(owned(report({}), "buffers"), kTable);
  EXPECT_EQ(owned(report({}, 2), "buffers"), kTable);
  const Words longer = {"--training.seq_len", "8192", "--training.local_batch_size", "1"};
  EXPECT_EQ(owned(report(longer), "buffers"), 2 * kTable);
}

TEST_F(MemoryReportTest, NamesRegisteredBuffers) {
  if (!model_specs().contains("buffered"))
    register_model<BigramArgs>("buffered",
                               {.flavors = {{"debugmodel", {}}},
                                .sizes = [](const BigramArgs&) -> ModelSizes { return {.vocab_size = 16}; },
                                .build =
                                    [](const BigramArgs&, const BuildOptions& options) {
                                      return std::make_unique<BufferedModel>(options.construct);
                                    },
                                .parallelize = [](TrainableModel&, const ParallelPlan&) {}});
  const MemoryReport of_model = report({"--model.name", "buffered"});
  EXPECT_EQ(owned(of_model, "buffers"), 40);
  EXPECT_NE(table_of(of_model).find("buffers"), std::string::npos);
  for (const MemoryOwner& owner : of_model.owners)
    if (owner.name == "buffers") EXPECT_EQ(owner.details, "seen 0.0000");
}

TEST(OutOfMemory, IsRecognizedByTypeAndByText) {
  EXPECT_TRUE(is_out_of_memory(std::bad_alloc()));
  EXPECT_TRUE(is_out_of_memory(c10::OutOfMemoryError({"f", "f.cpp", 1}, "CUDA out of memory. Tried to")));
  EXPECT_TRUE(is_out_of_memory(
      Error("in action 0F1: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")));
  EXPECT_FALSE(is_out_of_memory(Error("step 3: the loss isn't finite on rank 1")));
  EXPECT_FALSE(is_out_of_memory(
      Error("in action 1F0: connection closed\nThe first to fail was rank 0: CUDA out of memory")));
}

TEST(MemoryTable, JoinsNeighborsOfTheSameSize) {
  constexpr double kGib = 1024.0 * 1024.0 * 1024.0;
  EXPECT_EQ(list_of({{"embedding", 0}, {"layers.0", kGib}, {"layers.1", kGib}, {"layers.2", 2 * kGib}}),
            "embedding 0.0000, layers.0 to layers.1 1.00 each, layers.2 2.00");
}

TEST(MemoryTable, ShowsLiveBlocksBesideComputedSizes) {
  constexpr double kGib = 1024.0 * 1024.0 * 1024.0;
  MemoryReport report{{{"activations", 3 * kGib, "of layers"}, {"parameters", 2 * kGib, "of shards"}}, {}};
  EXPECT_EQ(table_of(report),
            "  activations      3.00 GiB  of layers\n"
            "  parameters       2.00 GiB  of shards\n"
            "  all              5.00 GiB\n");
  report.live = {{"parameters", 2.5 * kGib}, {"all other blocks", 8 * kGib}};
  EXPECT_EQ(table_of(report),
            "                    computed        in use\n"
            "  activations           3.00 GiB         -      of layers\n"
            "  parameters            2.00 GiB      2.50 GiB  of shards\n"
            "  all other blocks         -          8.00 GiB\n"
            "  all                   5.00 GiB     10.50 GiB\n");
}

}  // namespace
}  // namespace titan::train
