#include "dist/job_identity.h"

#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace titan::dist {
namespace {

using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

JobIdentity identity_of(const Variables& variables) {
  return read_job_identity([variables](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return {};
    return found->second;
  });
}

TEST(JobIdentity, IsTheLaunchersThatStartsRanksAgain) {
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

TEST(JobIdentity, ElseItSaysWhyNobodyStartsThemAgain) {
  const Variables ranks = {
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "here"}, {"MASTER_PORT", "1234"}};
  const auto expect = [](const Variables& variables, const char* why) {
    const JobIdentity job = identity_of(variables);
    EXPECT_EQ(job.id, "");
    EXPECT_THAT(job.problem, HasSubstr(why));
  };
  expect({}, "nobody launched");
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
