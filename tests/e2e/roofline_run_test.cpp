// titan train --report-roofline: the table, the file, and that nothing else changes.

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "e2e/small_run.h"
#include "e2e/training.h"

namespace titan::testing {
namespace {

using nlohmann::json;

const Words kOneRank = {"--nproc", "1", "--training.local_batch_size", "4"};

struct Report {
  std::string log;
  json all;
  std::vector<double> losses;

  /// The rows of a table by kind.
  std::map<std::string, json> rows(const char* table) const {
    std::map<std::string, json> found;
    for (const json& row : all.at(table)) found[row.at("kind")] = row;
    return found;
  }
};

Report report_of(const Words& words) {
  const auto folder = fresh_folder("run");
  const CommandResult result = try_train(
      Words{"--report-roofline"} + small_run(folder) + words + Words{"--job.dump_folder", folder.string()},
      100);
  EXPECT_EQ(result.status, 0) << result.err;
  std::ifstream file(folder / "roofline.json");
  EXPECT_TRUE(file.good()) << result.err;
  return {result.err, json::parse(file), losses(read_metrics(folder))};
}

std::vector<double> plain_losses(const Words& words) {
  const auto folder = fresh_folder("plain");
  const auto steps = train(folder, small_run(folder) + words);
  EXPECT_FALSE(std::filesystem::exists(folder / "roofline.json"));
  return losses(steps);
}

// FLOPs of the small run's products in a step: 6 for each weight of a linear layer and each of 4 x 48 tokens.
constexpr double kAttentionWeights = 64 * (64 + 32 + 32 + 64), kHead = 64 * 258;
constexpr double kTokens = 4 * 48;

TEST(Roofline, TellsWhereAStepsTimeGoesAndChangesNothing) {
  const Report report = report_of(kOneRank);
  EXPECT_EQ(report.losses, plain_losses(kOneRank)) << "bit for bit";
  EXPECT_EQ(report.all.at("step"), 4);
  const auto operations = report.rows("operations");
  for (const char* kind :
       {"products", "attention", "norms", "rotary", "swiglu", "loss", "embedding", "optimizer"}) {
    ASSERT_TRUE(operations.contains(kind)) << kind << report.all;
    const json& row = operations.at(kind);
    EXPECT_GT(row.at("calls"), 0) << row;
    EXPECT_GT(row.at("bytes_read"), 0) << row;
    EXPECT_GT(row.at("seconds"), 0) << row;
    EXPECT_GT(row.at("share_of_limit"), 0) << row;
    EXPECT_THAT(report.log, ContainsRegex(str("\n", kind, " ")));
  }
  const double hidden = 192;  // 2/3 of 4 x 64, rounded up to a multiple of 32
  const double weights = 2 * (kAttentionWeights + 3 * 64 * hidden) + kHead;
  EXPECT_EQ(operations.at("products").at("flops"), 6 * kTokens * weights);
  EXPECT_EQ(operations.at("products").at("dtype"), "float32");
  EXPECT_EQ(operations.at("norms").at("limit"), "bandwidth");
  EXPECT_EQ(operations.at("norms").at("calls"), 10);
  EXPECT_TRUE(report.all.at("collectives").empty());
  // Times of operations don't overlap on a CPU. A kind has a row for each dtype.
  double sum = report.all.at("idle_s");
  for (const json& row : report.all.at("operations")) sum += row.at("seconds").get<double>();
  EXPECT_NEAR(sum, report.all.at("step_s"), 1e-9);
  EXPECT_GT(report.all.at("limits").at("flops_per_s").at("float32"), 1e8);
  EXPECT_GT(report.all.at("limits").at("bytes_per_s"), 1e8);
  EXPECT_THAT(report.log, AllOf(HasSubstr("roofline of step 4 on rank 0: "), HasSubstr("by the host's clock"),
                                HasSubstr("GFLOP/s in float32"), HasSubstr("roofline.json")));
}

void expect_collectives(const Report& report, const std::vector<std::string>& kinds) {
  const auto collectives = report.rows("collectives");
  for (const std::string& kind : kinds) {
    ASSERT_TRUE(collectives.contains(kind)) << kind << report.all.at("collectives");
    const json& row = collectives.at(kind);
    EXPECT_GT(row.at("calls"), 0) << row;
    EXPECT_GT(row.at("bytes"), 0) << row;
    EXPECT_GT(row.at("seconds"), 0) << row;
    EXPECT_LE(row.at("exposed_s"), report.all.at("step_s")) << row;
    EXPECT_LE(row.at("hidden_s"), row.at("seconds")) << row;
  }
  EXPECT_EQ(report.all.at("lost_calls"), 0);
}

TEST(Roofline, ReportsExposedCollectivesOfEachLayout) {
  const Words two = {"--nproc", "2", "--training.local_batch_size", "2"};
  const Report fsdp = report_of(two);
  EXPECT_EQ(fsdp.losses, plain_losses(two));
  expect_collectives(fsdp, {"all_gather", "reduce_scatter", "all_reduce"});
  EXPECT_THAT(fsdp.log, AllOf(HasSubstr("exposed ms"), HasSubstr("[rank 0] all_gather ")));
  const Words tensor = {
      "--nproc", "2", "--training.local_batch_size", "4", "--parallelism.tensor_parallel_degree", "2"};
  const Report tp = report_of(tensor);
  EXPECT_EQ(tp.losses, plain_losses(tensor));
  expect_collectives(tp, {"all_gather", "reduce_scatter"});
}

TEST(Roofline, CountsEachStageOfAPipelineForItself) {
  const Words two = {"--nproc",
                     "2",
                     "--training.local_batch_size",
                     "4",
                     "--parallelism.pipeline_parallel_degree",
                     "2",
                     "--validation.enable",
                     "false",
                     "--metrics.save_for_all_ranks"};
  const Report first = report_of(two);
  EXPECT_EQ(first.losses, plain_losses(two));
  expect_collectives(first, {"send", "receive"});
  EXPECT_FALSE(first.rows("operations").contains("loss")) << "the last stage's";
  EXPECT_TRUE(first.rows("operations").contains("embedding"));
}

TEST(Roofline, RefusesWhatItCannotMeasure) {
  const auto folder = fresh_folder("run");
  const auto refusal = [&](const Words& words) {
    const CommandResult result = try_train(Words{"--report-roofline"} + small_run(folder) + kOneRank + words);
    EXPECT_EQ(result.status, 2) << result.err;
    return result.err;
  };
  EXPECT_THAT(refusal({"--training.steps", "3"}),
              AllOf(HasSubstr("metrics.report_roofline"), HasSubstr("training.steps = 3")));
  EXPECT_THAT(refusal({"--profiling.enable_profiling"}), HasSubstr("can't be combined with profiling"));
  EXPECT_THAT(refusal({"--comm.trace_buf_size", "0"}), HasSubstr("flight recorder"));
}

}  // namespace
}  // namespace titan::testing
