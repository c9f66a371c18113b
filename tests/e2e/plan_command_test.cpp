// titan plan as a user runs it: real configs, no GPU.

#include <cmath>
#include <fstream>
#include <map>
#include <numeric>
#include <regex>
#include <sstream>
#include <thread>

#include <gtest/gtest.h>

#include "e2e/live_run.h"
#include "e2e/plan.h"
#include "titan/core/error.h"

namespace titan::testing {
namespace {

using nlohmann::json;

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
  const json& over_time = role.at("over_time");
  EXPECT_GT(over_time.size(), 50U);
  // At every point, the modules' bytes make the categories' sum.
  std::vector<int64_t> sums(over_time.size());
  for (const json& owner : role.at("by_module"))
    for (size_t i = 0; i < owner.at("changes").size(); ++i) {
      const json& change = owner.at("changes")[i];
      const int64_t before = i > 0 ? owner.at("changes")[i - 1][1].get<int64_t>() : 0;
      sums.at(change[0].get<size_t>()) += change[1].get<int64_t>() - before;
    }
  std::partial_sum(sums.begin(), sums.end(), sums.begin());
  for (size_t i = 0; i < sums.size(); ++i) EXPECT_EQ(sums[i], over_time[i].at("bytes").get<int64_t>()) << i;
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
      int64_t calls = 0, bytes = 0;
      for (const json& call : row.at("each")) {
        calls += call.at("calls").get<int64_t>();
        bytes += call.at("calls").get<int64_t>() * call.at("bytes").get<int64_t>();
        if (call.at("module") == "layers.3") EXPECT_EQ(call.at("calls"), 2);
      }
      EXPECT_EQ(calls, row.at("calls"));
      EXPECT_EQ(bytes, row.at("bytes"));
      EXPECT_EQ(row.at("each").size(), 34U);
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
  EXPECT_THAT(result.out, AllOf(HasSubstr("llama3 405B on 512 x NVIDIA H100 80GB HBM3: a step takes"),
                                HasSubstr("fits: ")));
  EXPECT_LT(result.elapsed_s, 60);
  EXPECT_LT(usage_of_children().peak_gb, 2);
}

TEST(PlanCommand, TakesNoLongerForMoreRanks) {
  const CommandResult few = plan("llama3_405b", 512), many = plan("llama3_405b", 16384);
  EXPECT_EQ(many.status, 0) << many.err;
  EXPECT_LT(many.elapsed_s, 3 * few.elapsed_s + 5);
}

// The changes are planned as jobs of their own.
TEST(PlanCommand, SaysWhatWouldMakeAJobFit) {
  const Words words = {"--training.local_batch_size=4", "--activation_checkpoint.mode=none"};
  const CommandResult result = plan("llama3_8b", 8, words);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("doesn't fit: needs "), HasSubstr("what makes it fit"), HasSubstr(" others ")));
  const json found = plan_json("llama3_8b", 8, words);
  EXPECT_EQ(found.at("fits"), false);
  EXPECT_GT(found.at("missing_gib"), 0);
  const json& changes = found.at("changes_that_fit");
  ASSERT_EQ(changes.size(), 3U);
  EXPECT_GE(changes[0].at("tokens_per_s_per_device"), changes[1].at("tokens_per_s_per_device"));
  Words changed = words;
  for (const json& word : changes[0].at("settings")) changed.push_back(word);
  const json fitting = plan_json("llama3_8b", 8, changed);
  EXPECT_EQ(fitting.at("fits"), true);
  EXPECT_EQ(fitting.at("memory").at("peak_gib"), changes[0].at("peak_gib"));
}

TEST(PlanCommand, TriesRecomputationByOperation) {
  const json changes =
      plan_json("llama3_8b", 8, {"--training.seq_len=24576", "--activation_checkpoint.mode=none"})
          .at("changes_that_fit");
  EXPECT_THAT(changes.dump(), HasSubstr("--activation_checkpoint.selective_ac_option=op"));
}

// Doubled degrees leave half as many replicas, which then have twice as many sequences each. A batch of 3 has only itself and 1 as divisors.
TEST(PlanCommand, KeepsTheBatchInEveryChange) {
  const json found =
      plan_json("llama3_8b", 8, {"--activation_checkpoint.mode=none", "--training.local_batch_size=3"});
  EXPECT_EQ(found.at("fits"), false);
  const json& changes = found.at("changes_that_fit");
  ASSERT_FALSE(changes.empty());
  EXPECT_EQ(changes[0].at("settings"),
            json({"--training.local_batch_size=1", "--training.global_batch_size=24"}));
  for (const json& change : changes)
    EXPECT_THAT(change.at("settings").dump(), HasSubstr("--training.global_batch_size=24"));
}

TEST(PlanCommand, FindsTheLargestBatchThatFits) {
  Words words = {"--model.args.n_layers=8", "--activation_checkpoint.mode=none",
                 "--training.local_batch_size=24"};
  const json changes = plan_json("llama3_8b", 1, words).at("changes_that_fit");
  ASSERT_FALSE(changes.empty());
  EXPECT_EQ(changes[0].at("settings")[0], "--training.local_batch_size=4");
  words.back() = "--training.local_batch_size=6";
  EXPECT_EQ(plan_json("llama3_8b", 1, words).at("fits"), false);
}

TEST(PlanCommand, CombinesRecomputationWithAnotherChange) {
  const json found = plan_json(
      "llama3_8b", 1,
      {"--model.args.n_layers=16", "--activation_checkpoint.mode=none", "--training.local_batch_size=9"});
  const json& changes = found.at("changes_that_fit");
  ASSERT_EQ(changes.size(), 2U);
  EXPECT_EQ(changes[1].at("settings"),
            json({"--activation_checkpoint.mode=full", "--training.local_batch_size=3",
                  "--training.global_batch_size=9"}));
}

TEST(PlanCommand, SaysThatNoSingleChangeMakesAJobFit) {
  EXPECT_THAT(
      plan("llama3_405b", 8, {"--model.args.n_layers=32", "--parallelism.tensor_parallel_degree=8"}).out,
      HasSubstr("no doubled degree, smaller batch or other single change makes it fit, with or without more "
                "recomputation; titan plan --search"));
}

// This pipeline takes half a minute and more.
TEST(PlanCommand, EndsWithTheRunThatItIsFor) {
  const std::string words = std::string(" plan ") + TITAN_SOURCE_DIR +
                            "/configs/llama3_405b_pp.toml --world 512 --json --for-run $$";
  Command run({"sh", "-c", titan_program() + words + " & wait"});
  int child = 0;
  ASSERT_TRUE(wait_until([&] {
    const std::vector<int> children = children_of(run.pid());
    if (!children.empty()) child = children[0];
    return child > 0;
  }));
  std::this_thread::sleep_for(std::chrono::seconds(1));  // it has become titan plan
  EXPECT_TRUE(is_running(child));
  run.signal(SIGKILL);
  EXPECT_TRUE(wait_until([&] { return !is_running(child); }, 10));
}

// A run has no use for other jobs than its own.
TEST(PlanCommand, LooksForNoChangesForARun) {
  const std::string words = std::string(" plan ") + TITAN_SOURCE_DIR +
                            "/configs/llama3_8b.toml --world 8 --training.local_batch_size=8"
                            " --activation_checkpoint.mode=none --json --for-run $$";
  const CommandResult result = run({"sh", "-c", titan_program() + words + "; exit $?"}, {}, 300);
  ASSERT_EQ(result.status, 0) << result.err;
  const json found = json::parse(result.out);
  EXPECT_EQ(found.at("fits"), false);
  EXPECT_GT(found.at("missing_gib"), 0);
  EXPECT_FALSE(found.contains("changes_that_fit"));
}

double seconds_of(const json& time, const char* activity) { return time.at(activity).get<double>(); }

// Many have measured Llama 3.1 8B on 8 H100: between 40 and 65 % of the peak.
TEST(PlanCommand, TellsHowLongAStepTakes) {
  const json found = plan_json("llama3_8b", 8);
  EXPECT_GT(found.at("mfu"), 0.40);
  EXPECT_LT(found.at("mfu"), 0.65);
  const double step = found.at("step_s");
  EXPECT_NEAR(found.at("tokens_per_s_per_device"), 8192 / step, 1);
  const json& time = found.at("time");
  double sum = 0;
  for (const char* activity : {"compute", "optimizer", "exposed_communication", "bubble", "host"})
    sum += seconds_of(time, activity);
  EXPECT_NEAR(sum, step, 1e-6);
  EXPECT_GT(seconds_of(time, "communicating"), 5 * seconds_of(time, "exposed_communication"));
  // Other kernels do more for the same step.
  const double compiled = plan_json("llama3_8b", 8, {"--kernels", "compiled"}).at("step_s");
  const double eager = plan_json("llama3_8b", 8, {"--kernels", "eager"}).at("step_s");
  EXPECT_LT(step, compiled);
  EXPECT_LT(compiled, eager);
}

TEST(PlanCommand, WaitsForTheContextRankWithMostToDo) {
  const auto step_s = [](const char* balancer, const Words& more) -> double {
    const Words words = {"--model.args.n_layers=4", "--training.seq_len=32768",
                         "--parallelism.context_parallel_degree=4",
                         str("--parallelism.context_parallel_load_balancer=", balancer)};
    return plan_json("llama3_8b", 8, words + more).at("step_s");
  };
  const Words pipeline = {"--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2"};
  for (const Words& more : {Words{}, pipeline})
    EXPECT_GT(step_s("None", more), 1.1 * step_s("headtail", more));
}

TEST(PlanCommand, TellsAPipelinesBubble) {
  const Words words = {"--model.args.n_layers=16", "--parallelism.pipeline_parallel_degree=4",
                       "--parallelism.pipeline_parallel_schedule=1F1B",
                       "--parallelism.pipeline_parallel_microbatch_size=1", "--training.local_batch_size=8"};
  const json found = plan_json("llama3_8b", 32, words);
  // 1F1B of p ranks and m micro-batches: (p - 1) / (m + p - 1) of the step.
  EXPECT_NEAR(seconds_of(found.at("time_by_role")[1], "bubble") / found.at("step_s").get<double>(), 3.0 / 11,
              0.06);
}

int64_t nanoseconds(const json& micro) { return std::llround(1e3 * micro.get<double>()); }

/// The slices of a timeline by process and the name of their thread, in order. Perfetto takes no number of a thread and no time below 0, and drops
/// slices that overlap others of their thread.
std::map<std::pair<int, std::string>, std::vector<json>> lanes_of(const std::string& timeline) {
  std::ifstream file(timeline);
  const json trace = json::parse(file);
  std::map<std::pair<int, int>, std::string> names;
  std::map<std::pair<int, std::string>, std::vector<json>> lanes;
  std::map<int, double> counted;  // by process, when its memory was last counted
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("name") == "process_name") continue;
    if (event.at("ph") == "C") {
      const auto [last, is_first] = counted.emplace(event.at("pid"), 0);
      EXPECT_TRUE(is_first ? event.at("ts") >= 0 : event.at("ts") > last->second) << event;
      last->second = event.at("ts");
      continue;
    }
    const int pid = event.at("pid"), tid = event.at("tid");
    EXPECT_GE(tid, 0) << event;
    if (event.at("ph") == "M") {
      EXPECT_TRUE(names.emplace(std::pair(pid, tid), event.at("args").at("name")).second) << event;
      continue;
    }
    EXPECT_GE(event.at("ts"), 0) << event;
    std::vector<json>& lane = lanes[{pid, names.at({pid, tid})}];
    if (!lane.empty())
      EXPECT_GE(nanoseconds(event.at("ts")),
                nanoseconds(lane.back().at("ts")) + nanoseconds(lane.back().at("dur")))
          << lane.back() << event;
    lane.push_back(event);
  }
  EXPECT_EQ(lanes.size(), names.size());
  EXPECT_FALSE(counted.empty());
  return lanes;
}

void expect_pipeline_pictures(const Words& more, const char* computation) {
  const fs::path folder = fresh_folder("plan");
  const std::string timeline = folder / "step.json", picture = folder / "step.svg";
  const Words words = {"--model.args.n_layers=4",
                       "--parallelism.pipeline_parallel_degree=2",
                       "--parallelism.tensor_parallel_degree=2",
                       "--training.local_batch_size=2",
                       "--timeline",
                       timeline,
                       "--svg",
                       picture};
  ASSERT_EQ(plan("llama3_8b", 8, words + more).status, 0);
  const auto lanes = lanes_of(timeline);
  for (const int rank : {0, 4})
    for (const char* name : {"calls of pp.0-1", "calls of tp", "calls of dp_shard"})
      EXPECT_TRUE(lanes.contains({rank, name})) << rank << name;
  EXPECT_GT(lanes.at({0, computation}).size(), 100U);
  // In the picture, each of the two ranks has its communication below its computation; one more such box is the legend's.
  std::ifstream image(picture);
  const std::string svg((std::istreambuf_iterator<char>(image)), {});
  std::map<std::string, int> boxes;  // by height on the page
  const std::regex box("<rect x=\"[0-9.]+\" y=\"([0-9.]+)\" [^>]*fill=\"#ccbb44\"/>");
  for (std::sregex_iterator each(svg.begin(), svg.end(), box), none; each != none; ++each)
    ++boxes[(*each)[1]];
  ASSERT_EQ(boxes.size(), 3U);
  EXPECT_EQ(boxes.at("36.0"), 1);
  for (const char* y : {"78.0", "99.0"}) EXPECT_GT(boxes.at(y), 5) << y;
}

TEST(PlanCommand, ShowsAPipelinesCommunication) { expect_pipeline_pictures({}, "default"); }

TEST(PlanCommand, ShowsARecordedPipelinesCommunication) {
  expect_pipeline_pictures({"--compile.enable"}, "computation");
}

// In the first step receives are posted late, and so many sends are on their way that waits for them would hang.
TEST(PlanCommand, RunsADeepPipelinesFirstStep) {
  for (const char* schedule : {"InterleavedZeroBubble", "Interleaved1F1B", "ZBVZeroBubble"})
    EXPECT_GT(
        plan_json("llama3_debug", 16,
                  {"--parallelism.pipeline_parallel_degree=16",
                   str("--parallelism.pipeline_parallel_schedule=", schedule),
                   "--parallelism.pipeline_parallel_microbatch_size=1", "--training.local_batch_size=32",
                   "--model.args.n_layers=30", "--model.args.dim=32", "--training.seq_len=32"})
            .at("step_s"),
        0);
}

// A model of this size takes the device less time than its launches take the host.
TEST(PlanCommand, HasNoTimeOfTheHostInRecordedSteps) {
  const json usual = plan_json("llama3_debug", 2, {}),
             recorded = plan_json("llama3_debug", 2, {"--compile.enable"});
  EXPECT_GT(usual.at("time").at("host"), 0.3 * usual.at("step_s").get<double>());
  EXPECT_LT(recorded.at("time").at("host"), 0.05 * recorded.at("step_s").get<double>());
  EXPECT_LT(recorded.at("step_s"), 0.7 * usual.at("step_s").get<double>());
}

TEST(PlanCommand, WritesATimelineAndAPicture) {
  const auto folder = fresh_folder("plan");
  const std::string timeline = folder / "step.json", picture = folder / "step.svg";
  EXPECT_EQ(
      plan("llama3_8b", 8, {"--model.args.n_layers=2", "--timeline", timeline, "--svg", picture}).status, 0);
  const auto lanes = lanes_of(timeline);
  double end = 0;
  for (const auto& [unused, lane] : lanes) {
    end = std::max(end, lane.back().at("ts").get<double>() + lane.back().at("dur").get<double>());
  }
  EXPECT_GT(lanes.at({0, "default"}).size(), 80U);
  // Four groups are gathered in the forward and two of them again in the backward, and each is reduced. One of the gathers may begin before the step.
  EXPECT_GE(lanes.at({0, "calls of stage"}).size(), 5U);
  EXPECT_EQ(lanes.at({0, "calls of dp_shard.reduce"}).size(), 4U);
  EXPECT_GT(end, 10e3);
  std::ifstream image(picture);
  const std::string svg((std::istreambuf_iterator<char>(image)), std::istreambuf_iterator<char>());
  EXPECT_THAT(svg, AllOf(HasSubstr("<svg "), HasSubstr("fsdp gather"), HasSubstr("activations"),
                         HasSubstr("</svg>")));
  // Memory has steps: nothing is allocated while a stream only waits.
  const size_t begin = svg.find("<polygon points=\"") + std::string("<polygon points=\"").size();
  std::istringstream points(svg.substr(begin, svg.find('"', begin) - begin));
  double last_x = 0, last_y = 0, x = 0, y = 0;
  int num_points = 0;
  for (char comma = 0; points >> x >> comma >> y; last_x = x, last_y = y)
    EXPECT_TRUE(num_points++ == 0 || x == last_x || y == last_y) << x << "," << y;
  EXPECT_GT(num_points, 100);
  // Times at round distances.
  std::vector<double> marks;
  const std::regex label("text-anchor=\"middle\">([0-9.]+) ms</text>");
  for (std::sregex_iterator each(svg.begin(), svg.end(), label), none; each != none; ++each)
    marks.push_back(std::stod((*each)[1]));
  ASSERT_GT(marks.size(), 2U);
  EXPECT_EQ(std::remainder(marks[1], 5), 0) << marks[1];
}

// On a machine that others use, so only what can't depend on them.
TEST(PlanCommand, MeasuresThisMachine) {
  const std::string file = fresh_folder("plan") / "machine.toml";
  const CommandResult result = run({titan_program(), "plan", "--calibrate", file, "--world", "2"}, {}, 200);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("gathers of 2 ranks: "));
  std::ifstream written(file);
  const std::string text((std::istreambuf_iterator<char>(written)), {});
  const std::string host = text.substr(text.find("[host]"));
  EXPECT_THAT(host, HasSubstr("devices = 2"));
  const auto value_of = [&](const std::string& key) {
    return std::stod(host.substr(host.find(key) + key.size()));
  };
  EXPECT_GT(value_of("\ngb_per_s = "), 0.01);
  EXPECT_GT(value_of("\nlatency_us = "), 1);
  EXPECT_THAT(
      text, AllOf(HasSubstr("\nfeatures = 16\n"), HasSubstr("\nfeatures = 64\n"), HasSubstr("\nlate_us = ")));
  EXPECT_FALSE(fs::exists(file + ".links"));
  const json found = plan_json("llama3_debug", 2, {"--device", file});
  EXPECT_GT(found.at("step_s"), 0.01);
  EXPECT_LT(found.at("step_s"), 100);
}

TEST(PlanCommand, TakesDevicesFromFiles) {
  EXPECT_THAT(plan("llama3_8b", 8, {"--device", "h200"}).out, HasSubstr("NVIDIA H200"));
  const auto folder = fresh_folder("plan");
  std::ofstream(folder / "small.toml") << kDevice << "name = \"Small\"\nmemory_gib = 16\n" << kLinks;
  EXPECT_THAT(
      plan("llama3_8b", 8, {"--device", (folder / "small.toml").string()}).out,
      AllOf(HasSubstr("8 x Small"), HasSubstr("doesn't fit"),
            HasSubstr(
                "assumed, because the device's file leaves it out: device.compute_capability = 90, "
                "device.multiprocessors = 132, host.pcie_gb_per_s = 64, device.efficiency: products are as "
                "fast as whole tiles allow, device.attention: as fast as products of the same size\n")));
}

void expect_refused(const CommandResult& result, const std::string& key) {
  EXPECT_EQ(result.status, 2) << result.out;
  EXPECT_THAT(result.err, HasSubstr(key));
}

TEST(PlanCommand, NamesTheKeyOfAWrongValue) {
  expect_refused(plan("llama3_8b", 6, {"--parallelism.tensor_parallel_degree=4"}),
                 "--parallelism.tensor_parallel_degree = 4");
  expect_refused(plan("llama3_8b", 8, {"--parallelism.data_parallel_shard_degree=3"}),
                 "--parallelism.data_parallel_shard_degree = 3");
  expect_refused(plan("llama3_8b", 8, {"--device", "h1000"}),
                 "--device h1000: unknown device; known: a100, b200, cpu");
  expect_refused(plan("llama3_8b", 8, {"--device", "missing.toml"}), "there is no such file");
  expect_refused(plan("llama3_8b", 8, {"--training.enable_cpu_offload"}), "training.enable_cpu_offload");
  expect_refused(plan("llama3_8b", 8, {"--training.device=cpu"}), "training.device");
  expect_refused(plan("llama3_8b", 8, {"--training.local_batch_size=100000"}), "training.local_batch_size");
  expect_refused(plan("llama3_8b", 8, {"--comm.register_buffers"}), "comm.register_buffers");
  expect_refused(plan("llama3_8b", 8, {"--compile.enable", "--device", "cpu"}), "compile.enable");
  expect_refused(plan("llama3_8b", 8, {"--for-run", "1"}), "process 1 of --for-run didn't start this one");
  expect_refused(plan("llama3_8b", 8, {"--max-tp", "2"}), "need --search");
  expect_refused(plan("llama3_8b", 8, {"--search", "--svg", "a.svg"}), "--search plans many");
  expect_refused(
      plan(
          "llama3_8b", 8,
          {"--search", "--activation_checkpoint.mode=full", "--parallelism.pipeline_parallel_schedule=1F1B"}),
      "--search chooses parallelism.pipeline_parallel_schedule, activation_checkpoint.mode itself");
  expect_refused(plan("llama3_8b", 8, {"--search", "--activation_checkpoint.selective_ac_option=2"}),
                 "--search chooses activation_checkpoint.selective_ac_option itself");
  expect_refused(plan("llama3_8b", 8,
                      {"--search", "--sequences", "7", "--max-tp", "1", "--max-cp", "1", "--max-pp", "1"}),
                 "no layout of 8 ranks that is allowed shares 7 sequences a step equally");
  expect_refused(plan("llama3_8b", 8, {"--search", "--parallelism.pipeline_parallel_schedule_csv=a.csv"}),
                 "parallelism.pipeline_parallel_schedule_csv is set, but a search");
  expect_refused(plan("llama3_8b", 8, {"--search", "--output", "/no/such/folder/a.toml"}),
                 "can't write to the folder");
  expect_refused(plan("llama3_8b", 8, {"--kernels", "fast"}),
                 "--kernels fast must be one of ours, compiled, eager");
  expect_refused(plan("llama3_8b", 8, {"--device", "a100", "--model.converters=quantize.linear.float8"}),
                 "float8");
  expect_refused(run({titan_program(), "plan", std::string(TITAN_SOURCE_DIR) + "/configs/llama3_8b.toml"}),
                 "--world");
}

TEST(PlanCommand, SaysWhatIsPlannedInAnotherWay) {
  const Words words = {"--model.args.n_layers=2"};
  const json causal = plan_json("llama3_8b", 8, words);
  EXPECT_EQ(causal.at("notes").size(), 0U);
  const Words others = words + Words{"--model.args.attn_mask_type=block_causal", "--model.args.eos_id=5",
                                     "--validation.enable"};
  const json documents = plan_json("llama3_8b", 8, others);
  EXPECT_EQ(documents.at("notes").size(), 2U);
  EXPECT_EQ(documents.at("memory"), causal.at("memory"));
  EXPECT_EQ(documents.at("step_s"), causal.at("step_s"));
  EXPECT_THAT(plan("llama3_8b", 8, others).out,
              AllOf(HasSubstr("validation isn't planned"), HasSubstr("is planned as causal attention")));
}

// 8 sequences of 8,192 tokens leave about 0.2 GB of a block in the host's memory: PCIe needs longer for them than an H100 for the block's
// computation, the memory of the GPU doesn't.
TEST(PlanCommand, CopiesToTheHostTakeAsLongAsTheBusSays) {
  const auto step_at = [&](const char* gb_per_s, const char* mode) {
    const auto file = fresh_folder("plan") / "h100.toml";
    std::ifstream original(std::string(TITAN_SOURCE_DIR) + "/configs/devices/h100.toml");
    const std::string h100((std::istreambuf_iterator<char>(original)), std::istreambuf_iterator<char>());
    const std::string key = "pcie_gb_per_s = ";
    const size_t at = h100.find(key) + key.size();
    std::ofstream(file) << h100.substr(0, at) << gb_per_s << h100.substr(h100.find(' ', at));
    return plan_json("llama3_8b", 8,
                     {"--device", file.string(), "--model.args.n_layers=8",
                      std::string("--activation_checkpoint.mode=") + mode});
  };
  const json slow = step_at("8", "offload"), fast = step_at("1000", "offload");
  double bytes = 0;
  for (const json& row : fast.at("operations"))
    if (row.at("operation") == "cudaMemcpyAsync to the host") bytes += row.at("bytes_written").get<double>();
  EXPECT_GT(bytes, 1e9);
  // Both directions one after the other: into the host's memory in the forward, back in the backward.
  EXPECT_GE(slow.at("step_s").get<double>(), 2 * bytes / 8e9);
  EXPECT_GT(slow.at("time").at("exposed_communication"), 0.5 * slow.at("step_s").get<double>());
  EXPECT_LT(fast.at("step_s").get<double>(), 1.1 * step_at("64", "none").at("step_s").get<double>());
}

TEST(PlanCommand, CountsTheReferencesOperationsWhereAJobUsesThem) {
  const json found =
      plan_json("llama3_8b", 2, {"--model.args.n_layers=2", "--ops.kernels=reference"}).at("operations");
  ASSERT_FALSE(found.empty());
  for (const json& row : found)
    EXPECT_FALSE(row.at("operation").get<std::string>().ends_with("_kernel")) << row.at("operation");
}

// Ranks compute whole batches, of which the last ones of a step may be partly empty.
TEST(PlanCommand, CountsTheSequencesThatAStepHas) {
  const auto planned = [](int sequences) {
    return plan_json("llama3_8b", 8,
                     {"--model.args.n_layers=2", str("--training.global_batch_size=", sequences)});
  };
  const json whole = planned(8), half = planned(4), more = planned(12);
  EXPECT_EQ(half.at("step_s"), whole.at("step_s"));
  EXPECT_NEAR(half.at("tokens_per_s_per_device").get<double>(),
              whole.at("tokens_per_s_per_device").get<double>() / 2, 1e-6);
  EXPECT_NEAR(half.at("mfu").get<double>(), whole.at("mfu").get<double>() / 2, 1e-9);
  EXPECT_NEAR(more.at("tokens_per_s_per_device").get<double>(),
              12 * 8192 / more.at("step_s").get<double>() / 8, 1e-6);
}

TEST(PlanCommand, CountsWhatIsOutsideTheAllocator) {
  const Words words = {"--model.args.n_layers=2", "--parallelism.tensor_parallel_degree=8",
                       "--parallelism.enable_async_tensor_parallel"};
  const auto planned = [&](const std::string& transport, int world = 16) {
    return plan_json("llama3_8b", world,
                     words + Words{"--parallelism.async_tensor_parallel_transport=" + transport});
  };
  const json symmetric = planned("symmetric_memory");
  const json& found = symmetric.at("memory").at("by_role")[0];
  EXPECT_GE(found.at("communicators"), 1);
  EXPECT_GT(found.at("nccl_bytes"), 100 << 20);
  // A summand of each of 8 ranks: the whole sequence's hidden states in bf16.
  const int64_t shared = int64_t{8192} * 4096 * 2;
  EXPECT_EQ(found.at("symmetric_memory_bytes"), shared);
  // Without FSDP.
  EXPECT_EQ(planned("symmetric_memory", 8).at("memory").at("by_role")[0].at("symmetric_memory_bytes"),
            shared);
  const json by_messages = planned("send_receive");
  const json& sent = by_messages.at("memory").at("by_role")[0];
  EXPECT_EQ(sent.at("symmetric_memory_bytes"), 0);
  EXPECT_GT(sent.at("nccl_bytes"), found.at("nccl_bytes"));
  EXPECT_EQ(sent.at("peak_reserved_bytes"), found.at("peak_reserved_bytes"));
  EXPECT_EQ(by_messages.at("step"), symmetric.at("step"));
  // "auto" also chooses, product by product, whether parts gain anything; in another order, requests leave other gaps between blocks.
  const json automatic = planned("auto");
  EXPECT_EQ(automatic.at("memory").at("by_role")[0].at("peak_allocated_bytes"),
            found.at("peak_allocated_bytes"));
  EXPECT_LT(automatic.at("step")[0].at("launches"), symmetric.at("step")[0].at("launches"));
  EXPECT_THAT(plan("llama3_8b", 16, words).out, HasSubstr(" GiB symmetric memory\n"));
}

TEST(PlanCommand, CountsWhatRingsThatCopyShare) {
  const Words words = {"--model.args.n_layers=2", "--parallelism.context_parallel_degree=4"};
  const auto outside = [&](const std::string& method) {
    return plan_json("llama3_8b", 4, words + Words{"--parallelism.context_parallel_rotate_method=" + method})
        .at("memory")
        .at("by_role")[0];
  };
  const json copies = outside("symmetric_memory"), messages = outside("alltoall");
  // Keys and values of a quarter of 8,192 tokens in bf16, and their gradients in fp32.
  EXPECT_EQ(copies.at("symmetric_memory_bytes"), int64_t{8192} / 4 * 2 * 1024 * (2 + 4));
  EXPECT_EQ(messages.at("symmetric_memory_bytes"), 0);
  // Two rings of 4 channels, each with 10 MiB for what comes in and 2 MiB for what goes out.
  EXPECT_EQ(messages.at("nccl_bytes").get<int64_t>() - copies.at("nccl_bytes").get<int64_t>(),
            int64_t{2 * 4 * (10 + 2)} << 20);
}

TEST(PlanCommand, CountsNcclsBuffersBetweenHosts) {
  const auto of_communicator = [](int world) {
    const json role =
        plan_json("llama3_8b", world, {"--model.args.n_layers=1"}).at("memory").at("by_role")[0];
    return role.at("nccl_bytes").get<int64_t>() / role.at("communicators").get<int64_t>();
  };
  // Two neighbors on 16 channels have buffers within a host as above; between hosts of Simple, LL128 and LL for what comes in, and of the first two
  // for what goes out.
  constexpr int64_t simple = 4 << 20, ll128 = 120 * 640 * 8 * 8, ll = 8 * 512 * 8 * 16;
  EXPECT_EQ(of_communicator(8), int64_t{2 * 16 * (10 + 2)} << 20);
  EXPECT_EQ(of_communicator(16), 2 * 16 * (2 * simple + 2 * ll128 + ll));
}

TEST(PlanCommand, NamesTheKeyOfAWrongDeviceFile) {
  const auto file = fresh_folder("plan") / "wrong.toml";
  const auto planned_with = [&](const std::string& lines) {
    std::ofstream(file) << kDevice << "name = \"x\"\n" << lines << kLinks;
    return plan("llama3_8b", 8, {"--device", file.string()});
  };
  expect_refused(planned_with(""), "device.memory_gib is missing");
  expect_refused(planned_with("memory_gib = inf\ncompute_capability = 90\n"), "memory_gib");
  expect_refused(planned_with("memory_gib = 80\ncompute_capability = 9\n"), "compute_capability");
  expect_refused(planned_with("memory_gib = 80\ncompute_capability = 90\nnodes = 1\n"), "nodes");
}

CommandResult train_debug_model(const Words& words) {
  return run(Words{titan_program(), "train", std::string(TITAN_SOURCE_DIR) + "/configs/llama3_debug.toml",
                   "--job.dump_folder", (fresh_folder("plan") / "run").string(), "--model.hf_assets_path",
                   std::string(TITAN_SOURCE_DIR) + "/assets/tokenizer", "--training.steps", "2"} +
                 words,
             {}, 120);
}

// A plan of two ranks, of which TP and PP may have both: whatever it chooses, the job runs with it.
TEST(AutoDegrees, ThePlanChoosesThemForARun) {
  const CommandResult result = train_debug_model({"--nproc", "2", "--parallelism.tensor_parallel_degree",
                                                  "auto", "--parallelism.pipeline_parallel_degree", "auto"});
  EXPECT_EQ(result.status, 0) << result.err;
  const std::string log = result.out + result.err;
  EXPECT_THAT(log, AllOf(HasSubstr("looking for the degrees that are \"auto\""),
                         HasSubstr("degrees by titan plan for 2 x CPU"),
                         HasSubstr(" GiB of this machine's memory each"), HasSubstr("The second one"),
                         HasSubstr("step:  2")));
}

TEST(AutoDegrees, NeedTheNumberOfRanks) {
  expect_refused(train_debug_model({"--parallelism.tensor_parallel_degree", "auto"}),
                 "--parallelism.tensor_parallel_degree = auto: \"auto\" is chosen for the ranks of titan "
                 "train --nproc N");
  expect_refused(plan("llama3_8b", 8, {"--parallelism.context_parallel_degree=auto"}),
                 "parallelism.context_parallel_degree");
}

TEST(FakeBackend, OneProcessIsRank0OfMany) {
  const CommandResult result = train_debug_model(
      {"--nproc", "64", "--comm.mode", "fake_backend", "--parallelism.tensor_parallel_degree", "2"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out + result.err, HasSubstr("step:  2"));
  // 32 data-parallel ranks of 4 sequences of 256 tokens, twice.
  EXPECT_THAT(result.out + result.err, HasSubstr("has read 65536 tokens"));
  expect_refused(train_debug_model({"--nproc", "8", "--comm.mode", "fake_backend", "--checkpoint.enable"}),
                 "checkpoint.enable");
  expect_refused(
      train_debug_model({"--nproc", "8", "--comm.mode", "local_tensor"}),
      "computes all ranks in one process with a tensor type of Python's: on CPUs, --nproc starts a process");
}

// ---- what large plans take: minutes, so nightly. Time of cores, because others may use the machine

class PlanBudget : public ::testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(PlanBudget, HoldsForALargeModel) {
  const auto& [config, world] = GetParam();
  const double before_s = usage_of_children().cpu_s;
  const CommandResult result = plan(config, world, {"--parallelism.data_parallel_shard_degree=-1"}, 1500);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_LT(usage_of_children().cpu_s - before_s, world <= 512 ? 60 : 300);
  EXPECT_LT(usage_of_children().peak_gb, 2);
}

INSTANTIATE_TEST_SUITE_P(Llama405B, PlanBudget,
                         ::testing::Combine(::testing::Values("llama3_405b", "llama3_405b_pp"),
                                            ::testing::Values(512, 16384)),
                         [](const auto& info) {
                           return str(std::get<0>(info.param), "_on_", std::get<1>(info.param));
                         });

}  // namespace
}  // namespace titan::testing
