// titan plan --search.

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iomanip>
#include <limits>
#include <regex>
#include <sstream>

#include <gtest/gtest.h>

#include "e2e/plan.h"
#include "titan/core/error.h"

namespace titan::testing {
namespace {

using nlohmann::json;

TEST(PlanCommand, SearchesForTheFastestLayout) {
  const auto folder = fresh_folder("plan");
  const std::string best = folder / "best.toml";
  const CommandResult result =
      plan("llama3_8b", 8,
           {"--model.args.n_layers=4", "--parallelism.context_parallel_degree=1", "--search", "--sequences",
            "8", "--max-tp", "2", "--max-pp", "2", "--keep-precision", "--output", best, "--json"});
  ASSERT_EQ(result.status, 0) << result.err;
  const json found = json::parse(result.out);
  const json& layouts = found.at("best");
  ASSERT_EQ(layouts.size(), 10U);
  for (size_t i = 0; i < layouts.size(); ++i) {
    EXPECT_LE(layouts[i].at("tensor_parallel_degree"), 2);
    EXPECT_LE(layouts[i].at("pipeline_parallel_degree"), 2);
    EXPECT_EQ(layouts[i].at("context_parallel_degree"), 1);
    EXPECT_THAT(layouts[i].at("layout").get<std::string>(), Not(HasSubstr("Float8")));
    if (i > 0) EXPECT_GE(layouts[i].at("step_s"), layouts[i - 1].at("step_s"));
  }
  // The second one's times less the best one's, the largest difference first.
  const std::string why = found.at("why_the_second_loses");
  const auto milliseconds = [&](size_t place, const json::json_pointer& key) {
    return 1e3 * layouts[place].at(key).get<double>();
  };
  const auto difference = [&](const std::string& key) {
    return milliseconds(1, json::json_pointer("/" + key)) - milliseconds(0, json::json_pointer("/" + key));
  };
  const auto one_decimal = [](double x) {
    std::ostringstream text;
    text << std::fixed << std::setprecision(1) << x;
    return text.str();
  };
  EXPECT_THAT(why, ::testing::StartsWith(str("The second one (", layouts[1].at("layout").get<std::string>(),
                                             ") takes ", one_decimal(difference("step_s")),
                                             " ms more for a step: ")));
  double last = std::numeric_limits<double>::infinity();
  const std::regex part("[:,] ([a-z ]+) ([+-][0-9.]+) ms");
  for (std::sregex_iterator each(why.begin(), why.end(), part), none; each != none; ++each) {
    const double value = std::stod((*each)[2]);
    std::string activity = (*each)[1];
    std::ranges::replace(activity, ' ', '_');
    EXPECT_NEAR(value, difference("time/" + activity), 0.0501) << why;
    EXPECT_LE(std::abs(value), last) << why;
    last = std::abs(value);
  }
  EXPECT_TRUE(std::isfinite(last)) << why;
  // The written config is that layout's: planned alone, it takes the same.
  const CommandResult again = run({titan_program(), "plan", best, "--world", "8", "--json"}, {}, 100);
  ASSERT_EQ(again.status, 0) << again.err;
  EXPECT_NEAR(json::parse(again.out).at("step_s"), layouts[0].at("step_s"), 1e-9);
}

TEST(PlanCommand, SaysWhatASearchHadNoTimeFor) {
  const Words words = {"--model.args.n_layers=4",
                       "--search",
                       "--sequences",
                       "8",
                       "--max-tp",
                       "2",
                       "--max-cp",
                       "1",
                       "--max-pp",
                       "2",
                       "--seconds",
                       "1"};
  const fs::path folder = fresh_folder("plan"), written = folder / "llama3_8b_8xh100.toml";
  Words here = {"sh",
                "-c",
                "cd \"$0\" && exec \"$@\"",
                folder.string(),
                titan_program(),
                "plan",
                std::string(TITAN_SOURCE_DIR) + "/configs/llama3_8b.toml",
                "--world",
                "8"};
  const CommandResult result = run(here + words, {}, 300);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("The best one's config is in llama3_8b_8xh100.toml.\n"));
  EXPECT_TRUE(fs::exists(written)) << "without --output, it is written here";
  EXPECT_THAT(result.out, HasSubstr(" of its 1 s was left to plan them "));
  const json found = plan_json("llama3_8b", 8, words + Words{"--output", written.string()});
  EXPECT_EQ(found.at("time_is_up"), true);
  EXPECT_EQ(found.at("config"), written.string());
  EXPECT_GT(found.at("left"), 0);
  EXPECT_GE(found.at("layouts"), found.at("estimated"));
}

// Also if no estimate is small enough for a full plan.
TEST(PlanCommand, SaysHowMuchMemoryASearchMisses) {
  const auto folder = fresh_folder("plan");
  std::ofstream(folder / "small.toml") << kDevice << "name = \"Small\"\nmemory_gib = 2\n" << kLinks;
  const CommandResult result =
      plan("llama3_8b", 2,
           {"--model.args.n_layers=4", "--device", (folder / "small.toml").string(), "--search",
            "--sequences", "2", "--max-tp", "2", "--max-cp", "1", "--max-pp", "1"});
  EXPECT_EQ(result.status, 2) << result.out;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("no layout fits into 1.4 GiB: the smallest that was found ("),
                    HasSubstr("TP 2, micro-batch 1, recompute full) takes "), HasSubstr(" GiB too much")));
}

// ---- a large search: minutes, so nightly. Time of cores, because others may use the machine

TEST(SearchBudget, HoldsForALargeModel) {
  const double before_s = usage_of_children().cpu_s;
  const json found = plan_json("llama3_405b", 512,
                               {"--search", "--sequences", "512", "--seconds", "1500", "--output",
                                ::testing::TempDir() + "/searched.toml"},
                               1700);
  EXPECT_LT(usage_of_children().cpu_s - before_s, 2 * 300);
  EXPECT_EQ(found.at("time_is_up"), false);
}

// ---- a search beside the plans of all its layouts: minutes, so nightly

/// Adds the step's time of the 8-layer job with `words`, unless the program refuses it (status 2) or it doesn't fit.
void add_plan(const Words& words, std::vector<double>& all) {
  const CommandResult result = plan("llama3_8b", 8, Words{"--json", "--model.args.n_layers=8"} + words);
  if (result.status == 2) return;
  ASSERT_EQ(result.status, 0) << result.err;
  const json found = json::parse(result.out);
  if (found.at("fits")) all.push_back(found.at("step_s"));
}

/// That no layout is faster than what the search has at its place, and that estimates err by these shares at most.
void expect_the_best_ten(const json& found, std::vector<double> all, double time_error, double memory_error) {
  std::ranges::sort(all);
  const json& best = found.at("best");
  ASSERT_EQ(best.size(), 10U);
  ASSERT_GE(all.size(), 20U);
  for (size_t i = 0; i < best.size(); ++i) {
    SCOPED_TRACE(str("place ", i + 1, ": ", best[i].dump()));
    const double step_s = best[i].at("step_s"), needed_gib = best[i].at("needed_gib");
    EXPECT_LE(step_s, 1.005 * all[i]);  // larger micro-batches that save less aren't tried
    EXPECT_NEAR(best[i].at("estimate").at("step_s"), step_s, time_error * step_s);
    // An estimate leaves out what delayed weight gradients keep: the search learns it from its plans.
    const std::string layout = best[i].at("layout");
    const bool delays = layout.find("ZeroBubble") != layout.npos || layout.find("DualPipeV") != layout.npos;
    const double estimated_gib = best[i].at("estimate").at("needed_gib");
    EXPECT_LE(estimated_gib, (1 + memory_error) * needed_gib);
    EXPECT_GE(estimated_gib, (delays ? 0.5 : 1 - memory_error) * needed_gib);
  }
  EXPECT_EQ(found.at("refused").at("layouts"), 0);
  EXPECT_EQ(found.at("failed").at("layouts"), 0);
}

const Words kSearch = {"--model.args.n_layers=8",
                       "--search",
                       "--keep-precision",
                       "--max-cp",
                       "1",
                       "--seconds",
                       "10000",
                       "--output",
                       ::testing::TempDir() + "/searched.toml"};

TEST(SearchOfAll, FindsTheBestTenWithoutAPipeline) {
  std::vector<double> all;
  size_t num_layouts = 0;
  for (const int tensor : {1, 2})
    for (int replicate = 1; replicate <= 8 / tensor; replicate *= 2)
      for (int micro_batch = 1; micro_batch <= tensor; micro_batch *= 2)
        for (const char* recompute : {"none", "selective", "full"})
          for (const bool asynchronous : {false, true})
            for (const bool keeps : {false, true}) {
              if (asynchronous && tensor == 1) continue;
              ++num_layouts;
              add_plan({str("--parallelism.tensor_parallel_degree=", tensor),
                        str("--parallelism.data_parallel_replicate_degree=", replicate),
                        str("--training.local_batch_size=", micro_batch), "--training.global_batch_size=8",
                        str("--activation_checkpoint.mode=", recompute),
                        str("--parallelism.enable_async_tensor_parallel=", asynchronous ? "true" : "false"),
                        str("--parallelism.fsdp_reshard_after_forward=", keeps ? "never" : "default"),
                        str("--parallelism.fsdp_reduce_every_micro_batch=", keeps ? "false" : "true")},
                       all);
            }
  const json found =
      plan_json("llama3_8b", 8, kSearch + Words{"--sequences", "8", "--max-tp", "2", "--max-pp", "1"});
  EXPECT_EQ(found.at("layouts"), num_layouts);
  expect_the_best_ten(found, all, 0.01, 0.2);
}

// Layouts that recompute may be among the ten, too, if they are faster than those without of other schedules.
TEST(SearchOfAll, FindsTheBestTenOfAPipeline) {
  const Words degrees = {"--parallelism.pipeline_parallel_degree=2",
                         "--parallelism.data_parallel_replicate_degree=1"};
  std::vector<double> all;
  for (const char* schedule : {"GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
                               "ZBVZeroBubble", "DualPipeV"})
    for (const int layers_of_stage : {4, 2, 1})
      for (const int micro_batch : {1, 2, 4})
        add_plan(degrees + Words{"--training.local_batch_size=4", "--training.global_batch_size=16",
                                 str("--parallelism.pipeline_parallel_schedule=", schedule),
                                 str("--parallelism.pipeline_parallel_microbatch_size=", micro_batch),
                                 str("--parallelism.pipeline_parallel_layers_per_stage=", layers_of_stage),
                                 "--parallelism.pipeline_parallel_first_stage_less_layers=0",
                                 "--parallelism.pipeline_parallel_last_stage_less_layers=0",
                                 "--activation_checkpoint.mode=none"},
                 all);
  const json found =
      plan_json("llama3_8b", 8, kSearch + degrees + Words{"--sequences", "16", "--max-tp", "1"});
  expect_the_best_ten(found, all, 0.05, 0.24);
}

}  // namespace
}  // namespace titan::testing
