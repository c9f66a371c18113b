// The plan that titan train makes of its own run, on CPUs. On GPUs: tests/virtual_gpu/run_plan_test.sh.

#include <signal.h>

#include "e2e/small_run.h"

namespace titan::testing {
namespace {

const Words kTwoRanks = {"--nproc", "2"};

// Long enough for the plan, which the run doesn't wait for. The last steps were logged after it.
TEST(RunPlan, IsWrittenBesideARunWhoseDeviceIsNamed) {
  const auto folder = fresh_folder("run");
  Command run(
      train_words(small_run(folder) + kTwoRanks +
                  Words{"--job.dump_folder", folder.string(), "--metrics.plan_device=h100",
                        "--training.steps=100000", "--validation.enable=false", "--metrics.log_freq=10"}));
  const auto last_row = [&] {
    const Lines rows = whole_rows(folder);
    return rows.empty() ? nlohmann::json::object() : rows.back();
  };
  EXPECT_TRUE(wait_until([&] { return last_row().contains("percent_of_plan"); }, 100));
  run.signal(SIGTERM);
  const CommandResult result = run.wait(60);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("the plan for NVIDIA H100 80GB HBM3: a step in "), HasSubstr("of plan: ")));
  EXPECT_THAT(result.err, Not(HasSubstr("GiB of the plan"))) << "memory on a CPU is another kind";
  std::ifstream file(folder / "plan.json");
  const nlohmann::json plan = nlohmann::json::parse(file);
  EXPECT_EQ(plan.at("world"), 2);
  const nlohmann::json row = last_row();
  EXPECT_NEAR(row.at("percent_of_plan"),
              100 * row.at("tps").get<double>() / plan.at("tokens_per_s_per_device").get<double>(), 1e-9);

  EXPECT_EQ(testing::run({titan_program(), "report", folder.string()}).status, 0);
  std::ifstream page(folder / "report.html");
  const std::string html((std::istreambuf_iterator<char>(page)), {});
  EXPECT_THAT(html, AllOf(HasSubstr("Planned for 2 x NVIDIA H100 80GB HBM3"),
                          HasSubstr("<td>tokens/s per device</td>")));

  // The tensors that stay from step to step are as large on a CPU. There the plan's blocks of 512 bytes are the difference.
  std::ifstream measured_file(folder / "memory.json");
  const nlohmann::json measured = nlohmann::json::parse(measured_file);
  const nlohmann::json& role = plan.at("memory").at("by_role")[0];
  for (const auto& [category, of_plan] : {std::pair("parameters", role.at("after_step").at("parameters")),
                                          std::pair("gradients", role.at("shard_gradient_bytes")),
                                          std::pair("optimizer", role.at("after_step").at("optimizer"))}) {
    const double gib = measured.at(std::string(category) + "_gib").get<double>();
    EXPECT_GT(gib, 0) << category;
    EXPECT_NEAR(of_plan.get<double>() / (1 << 30), gib, 0.02 * gib) << category;
  }
}

TEST(RunPlan, IsLeftOutOnCpusByDefault) {
  const auto folder = fresh_folder("run");
  const CommandResult result =
      try_train(small_run(folder) + kTwoRanks + Words{"--job.dump_folder", folder.string()}, 100);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_FALSE(fs::exists(folder / "plan.json"));
  EXPECT_THAT(result.err, Not(AnyOf(HasSubstr("no plan"), HasSubstr("the plan for"))));
}

// The plan's process is a child of another thread than the first.
std::vector<int> children_of_threads(int pid) {
  std::vector<int> children;
  std::error_code ended;
  for (const auto& thread : fs::directory_iterator(str("/proc/", pid, "/task"), ended)) {
    std::ifstream file(thread.path() / "children");
    for (int child; file >> child;) children.push_back(child);
  }
  return children;
}

TEST(RunPlan, FailsWithoutTheRun) {
  const auto folder = fresh_folder("run");
  Command run(train_words(small_run(folder) + Words{"--job.dump_folder", folder.string(),
                                                    "--metrics.plan_device=h100", "--training.steps=100000",
                                                    "--validation.enable=false"}));
  std::vector<int> planning;
  ASSERT_TRUE(wait_until([&] { return !(planning = children_of_threads(run.pid())).empty(); }));
  kill(planning.front(), SIGKILL);
  EXPECT_TRUE(run.wait_for_errors("this run has no plan: titan plan was ended by signal 9", 100));
  const size_t rows = whole_rows(folder).size();
  EXPECT_TRUE(wait_until([&] { return whole_rows(folder).size() > rows + 1; })) << "the run continues";
  run.signal(SIGTERM);
  run.wait(60);
  EXPECT_FALSE(fs::exists(folder / "plan.json"));
}

TEST(RunPlan, RefusesAnUnknownDeviceBeforeTheRun) {
  const auto folder = fresh_folder("run");
  const CommandResult result =
      try_train(small_run(folder) + kTwoRanks +
                Words{"--job.dump_folder", folder.string(), "--metrics.plan_device=h1000"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("metrics.plan_device"), HasSubstr("known: a100, b200, cpu, h100")));
}

}  // namespace
}  // namespace titan::testing
