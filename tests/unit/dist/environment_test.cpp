#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>

#include "dist/environment.h"
#include "titan/core/error.h"

namespace titan::dist {
namespace {

using ::testing::HasSubstr;

Launch read(std::map<std::string, std::string> variables) {
  return read_launch([variables](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return {};
    return found->second;
  });
}

std::string problem_of(const std::map<std::string, std::string>& variables) {
  try {
    read(variables);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no problem";
}

TEST(Environment, NoneIsOneRank) {
  const Launch launch = read({});
  EXPECT_EQ(launch.by, "none");
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.size, 1);
}

TEST(Environment, Torchrun) {
  const Launch launch = read({{"RANK", "3"},
                              {"WORLD_SIZE", "4"},
                              {"LOCAL_RANK", "1"},
                              {"LOCAL_WORLD_SIZE", "2"},
                              {"MASTER_ADDR", "head"},
                              {"MASTER_PORT", "29500"},
                              {"TORCHELASTIC_RUN_ID", "x"},
                              {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                              {"TORCHELASTIC_RESTART_COUNT", "2"}});
  EXPECT_EQ(launch.by, "torchrun");
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.size, 4);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_size, 2);
  EXPECT_EQ(launch.store_host, "head");
  EXPECT_EQ(launch.store_port, 29500);
  EXPECT_FALSE(launch.serves_store);
}

TEST(Environment, ReadsMaxRestarts) {
  const std::map<std::string, std::string> rank = {
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "head"}, {"MASTER_PORT", "1"}};
  const auto restarts = [&](std::map<std::string, std::string> more) {
    more.insert(rank.begin(), rank.end());
    return read(more).max_restarts;
  };
  EXPECT_EQ(restarts({{"TITAN_LAUNCH", "1"}, {"TITAN_MAX_RESTARTS", "3"}}), 3);
  EXPECT_EQ(restarts({{"TITAN_LAUNCH", "1"}, {"TORCHELASTIC_MAX_RESTARTS", "3"}}), 0)
      << "a variable of another launcher";
  EXPECT_EQ(restarts({{"TORCHELASTIC_RUN_ID", "x"}, {"TORCHELASTIC_MAX_RESTARTS", "2"}}), 2);
  EXPECT_EQ(restarts({{"TORCHELASTIC_RUN_ID", "x"}, {"TITAN_MAX_RESTARTS", "2"}}), 0);
  EXPECT_EQ(restarts({{"TITAN_MAX_RESTARTS", "2"}}), 0) << "titan isn't the launcher";
}

TEST(Environment, TorchrunInsideATaskIgnoresTheTask) {
  const Launch launch = read({{"RANK", "5"},
                              {"WORLD_SIZE", "16"},
                              {"MASTER_ADDR", "a"},
                              {"MASTER_PORT", "1"},
                              {"TORCHELASTIC_RUN_ID", "x"},
                              {"SLURM_PROCID", "0"},
                              {"SLURM_STEP_ID", "0"},
                              {"SLURM_NTASKS", "2"}});
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.size, 16);
}

TEST(Environment, Slurm) {
  const Launch launch = read({{"SLURM_PROCID", "5"},
                              {"SLURM_NTASKS", "7"},
                              {"SLURM_STEP_ID", "0"},
                              {"SLURM_LOCALID", "1"},
                              {"SLURM_NODEID", "1"},
                              {"SLURM_TASKS_PER_NODE", "4,3"},
                              {"SLURM_JOB_ID", "123456"},
                              {"SLURM_NODELIST", "gpu[07-08]"}});
  EXPECT_EQ(launch.by, "slurm");
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.size, 7);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_size, 3);
  EXPECT_EQ(launch.store_host, "gpu07");
  EXPECT_GE(launch.store_port, 12000);
  EXPECT_LT(launch.store_port, 32000);
}

TEST(Environment, SlurmPortsDifferBetweenJobsAndSteps) {
  const auto port = [](const char* job, const char* step) {
    return read({{"SLURM_PROCID", "0"},
                 {"SLURM_NTASKS", "2"},
                 {"SLURM_JOB_ID", job},
                 {"SLURM_STEP_ID", step},
                 {"SLURM_NODELIST", "a"}})
        .store_port;
  };
  EXPECT_NE(port("100", "0"), port("101", "0"));
  EXPECT_NE(port("100", "0"), port("100", "1"));
}

TEST(Environment, AStepMayBeSmallerThanItsAllocation) {
  const Launch launch = read({{"SLURM_PROCID", "1"},
                              {"SLURM_NTASKS", "8"},
                              {"SLURM_STEP_NUM_TASKS", "2"},
                              {"SLURM_STEP_ID", "3"},
                              {"SLURM_NODELIST", "a"}});
  EXPECT_EQ(launch.by, "slurm");
  EXPECT_EQ(launch.size, 2);
}

TEST(Environment, AnAllocationWithoutATaskIsOneRank) {
  EXPECT_EQ(read({{"SLURM_NTASKS", "8"}, {"SLURM_NODELIST", "a"}}).by, "none");
}

TEST(Environment, AJobScriptIsOneRank) {
  std::map<std::string, std::string> script = {
      {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "1"}, {"SLURM_LOCALID", "0"}};
  EXPECT_EQ(read(script).by, "none");
  script["SLURM_STEP_ID"] = "4294967291";  // SLURM_BATCH_SCRIPT
  EXPECT_EQ(read(script).by, "none");
}

TEST(Environment, AnInteractiveStepIsOneRank) {
  const Launch launch = read({{"SLURM_PROCID", "0"},
                              {"SLURM_NTASKS", "8"},
                              {"SLURM_STEP_NUM_TASKS", "1"},
                              {"SLURM_STEP_ID", "4294967290"},  // SLURM_INTERACTIVE_STEP
                              {"SLURM_NODELIST", "a[1-2]"}});
  EXPECT_EQ(launch.by, "none");
  EXPECT_EQ(launch.size, 1);
}

TEST(Environment, RefusesAStepThatIsNoNumber) {
  EXPECT_THAT(problem_of({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_STEP_ID", "one"}}),
              HasSubstr("SLURM_STEP_ID=one isn't a non-negative number"));
}

TEST(Environment, OpenMpi) {
  const Launch launch = read({{"OMPI_COMM_WORLD_RANK", "1"},
                              {"OMPI_COMM_WORLD_SIZE", "2"},
                              {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_EQ(launch.by, "openmpi");
  EXPECT_EQ(launch.rank, 1);
  EXPECT_EQ(launch.local_size, 2);
  EXPECT_EQ(launch.store_host, "127.0.0.1");
  EXPECT_GT(launch.store_port, 0);
}

TEST(Environment, OpenMpiOnSeveralHostsNeedsAnAddress) {
  EXPECT_THAT(problem_of({{"OMPI_COMM_WORLD_RANK", "0"},
                          {"OMPI_COMM_WORLD_SIZE", "4"},
                          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                          {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}),
              HasSubstr("MASTER_ADDR isn't set"));
}

TEST(Environment, RefusesContradictoryLaunchers) {
  const std::map<std::string, std::string> common = {
      {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}, {"RANK", "0"}};
  auto sizes = common;
  sizes.insert({{"WORLD_SIZE", "2"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "0"}});
  EXPECT_THAT(problem_of(sizes), HasSubstr("WORLD_SIZE=2 (env) but SLURM_NTASKS=4 (slurm)"));
  auto ranks = common;
  ranks.insert({{"WORLD_SIZE", "4"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "3"}, {"SLURM_STEP_ID", "0"}});
  EXPECT_THAT(problem_of(ranks), HasSubstr("RANK=0 (env) but SLURM_PROCID=3 (slurm)"));
  auto mpi = common;
  mpi.insert({{"WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_RANK", "0"}});
  EXPECT_THAT(problem_of(mpi), HasSubstr("OMPI_COMM_WORLD_SIZE=8"));
}

TEST(Environment, MpirunInsideATaskIgnoresItsRank) {
  EXPECT_EQ(read({{"OMPI_COMM_WORLD_RANK", "3"},
                  {"OMPI_COMM_WORLD_SIZE", "4"},
                  {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                  {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                  {"SLURM_PROCID", "0"},
                  {"SLURM_STEP_ID", "0"},
                  {"SLURM_NTASKS", "4"}})
                .rank,
            3);
}

TEST(Environment, ReportsAllProblemsAtOnce) {
  const std::string problem = problem_of({{"RANK", "two"}, {"WORLD_SIZE", "2"}});
  EXPECT_THAT(problem, HasSubstr("RANK=two isn't a non-negative number"));
  EXPECT_THAT(problem, HasSubstr("MASTER_ADDR"));
  EXPECT_THAT(problem, HasSubstr("MASTER_PORT"));
  EXPECT_THAT(problem_of({{"RANK", "0"}}), HasSubstr("WORLD_SIZE isn't"));
  EXPECT_THAT(problem_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
              HasSubstr("RANK=2 isn't a rank of WORLD_SIZE=2"));
}

using Names = std::vector<std::string>;
using Counts = std::vector<int>;

TEST(NodeList, PlainNames) {
  EXPECT_EQ(parse_node_list("gpu1"), Names{"gpu1"});
  EXPECT_EQ(parse_node_list("gpu1,login-2.site"), (Names{"gpu1", "login-2.site"}));
  EXPECT_EQ(parse_node_list("127.0.0.1"), Names{"127.0.0.1"});
}

TEST(NodeList, RangesKeepTheirWidth) {
  EXPECT_EQ(parse_node_list("gpu[08-11]"), (Names{"gpu08", "gpu09", "gpu10", "gpu11"}));
  EXPECT_EQ(parse_node_list("n[7,9-10],m3"), (Names{"n7", "n9", "n10", "m3"}));
  EXPECT_EQ(parse_node_list("n[099-101]-ib"), (Names{"n099-ib", "n100-ib", "n101-ib"}));
}

TEST(NodeList, SeveralBracketsMultiply) {
  EXPECT_EQ(parse_node_list("r[1-2]n[01,02]"), (Names{"r1n01", "r1n02", "r2n01", "r2n02"}));
}

TEST(NodeList, RefusesDamagedLists) {
  for (const char* list : {"", "a,,b", "gpu[1-2", "gpu[]", "gpu[2-1]", "gpu[a-b]", "gpu[1-]"}) {
    EXPECT_THROW(parse_node_list(list), ConfigError) << list;
  }
}

TEST(TaskCounts, Repeats) {
  EXPECT_EQ(parse_task_counts("4"), Counts{4});
  EXPECT_EQ(parse_task_counts("4(x2),3"), (Counts{4, 4, 3}));
  EXPECT_THROW(parse_task_counts("4(x2"), ConfigError);
  EXPECT_THROW(parse_task_counts("x"), ConfigError);
}

using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

JobIdentity identity_of(const Variables& variables) {
  const Environment environment = [&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return {};
    return found->second;
  };
  return read_job_identity(read_launch(environment), environment);
}

TEST(JobIdentity, ComesFromTheRestartingLauncher) {
  const Variables ranks = {
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "here"}, {"MASTER_PORT", "1234"}};
  Variables titan = ranks;
  titan.insert({{"TITAN_LAUNCH", "1"}, {"TITAN_JOB_ID", "titan-7"}, {"TITAN_MAX_RESTARTS", "3"}});
  EXPECT_EQ(identity_of(titan).id, "titan-7");
  Variables torchrun = ranks;
  torchrun["TORCHELASTIC_RUN_ID"] = "my-job";
  EXPECT_EQ(identity_of(torchrun).id, "torchrun my-job");
  const Variables slurm = {{"SLURM_PROCID", "0"},
                           {"SLURM_NTASKS", "2"},
                           {"SLURM_STEP_ID", "4"},
                           {"SLURM_NODELIST", "n[1-2]"},
                           {"SLURM_JOB_ID", "99"}};
  EXPECT_EQ(identity_of(slurm).id, "slurm 99");
}

TEST(JobIdentity, ExplainsWhyRanksAreNotRestarted) {
  const Variables ranks = {
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "here"}, {"MASTER_PORT", "1234"}};
  const auto expect = [](const Variables& variables, const char* why) {
    const JobIdentity job = identity_of(variables);
    EXPECT_EQ(job.id, "");
    EXPECT_THAT(job.problem, HasSubstr(why));
  };
  expect({}, "this rank has no launcher");
  expect(ranks, "launched by env");
  Variables titan = ranks;
  titan.insert({{"TITAN_LAUNCH", "1"}, {"TITAN_JOB_ID", "titan-7"}, {"TITAN_MAX_RESTARTS", "0"}});
  expect(titan, "--max-restarts");
  Variables torchrun = ranks;
  torchrun["TORCHELASTIC_RUN_ID"] = "none";
  expect(torchrun, "--rdzv-id");
}

}  // namespace
}  // namespace titan::dist
