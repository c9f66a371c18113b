// Each problem is reported once, clearly, and by an exit code: 2 for settings, 1 for the environment.

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <thread>

#include "e2e/live_run.h"
#include "e2e/training.h"

namespace titan::testing {
namespace {

Words model() {
  return {source_file("docs/examples/custom_model/ngram.toml"), "--experimental.custom_import",
          std::string(TITAN_BINARY_DIR) + "/lib/libngram.so", "--training.steps", "3"};
}

TEST(Faults, ReportsAllProblemsOfAConfigAtOnce) {
  auto path = fresh_folder("config") / "bad.toml";
  std::ofstream(path) << "[training]\nstepz = 5\nseq_len = 0\n[optimizer]\nlr = \"fast\"\n";
  CommandResult result = try_train({path.string()});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr(path.string() + ":2:1"), HasSubstr("training.stepz"), HasSubstr("did you mean"),
                    HasSubstr(path.string() + ":3:1"), HasSubstr(path.string() + ":5:1")));
  EXPECT_THAT(result.err, Not(HasSubstr("#0")));  // no backtrace
}

TEST(Faults, NamesAnUnknownFlavor) {
  CommandResult result = try_train(model() + Words{"--model.flavor", "smal"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("smal"), HasSubstr("did you mean 'small'")));
}

TEST(Faults, ReportsAWrongWorldSizeBeforeAnyRankStarts) {
  CommandResult result =
      try_train(model() + Words{"--nproc", "2", "--parallelism.data_parallel_shard_degree", "3"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("data_parallel_shard_degree"), HasSubstr("the job has 2")));
  EXPECT_THAT(result.err, Not(HasSubstr("[rank")));
}

TEST(Faults, NamesAMissingPeerAfterTheInitTimeout) {
  const CommandResult result =
      run(train_words(model() + Words{"--comm.init_timeout_seconds", "2", "--job.dump_folder",
                                      fresh_folder("run").string()}),
          {{"RANK", "0"},
           {"WORLD_SIZE", "2"},
           {"MASTER_ADDR", "127.0.0.1"},
           {"MASTER_PORT", some_port()},
           {"OMP_NUM_THREADS", "1"}});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("1 of 2 ranks didn't connect"), HasSubstr("within 2 s, missing: 1")));
  EXPECT_GE(result.elapsed_s, 2);
  EXPECT_LT(result.elapsed_s, 40);  // not the minutes of the default
}

TEST(Faults, ChecksInputFilesBeforeAnyRankStarts) {
  CommandResult result =
      try_train(model() + Words{"--nproc", "2", "--training.dataset", "cpp_header", "--model.hf_assets_path",
                                "no/assets", "--parallelism.data_parallel_shard_degree", "3"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("did you mean 'cpp_headers'"), HasSubstr("no/assets (relative to the working"),
                    HasSubstr("the job has 2"), Not(HasSubstr("[rank"))));
  result = try_train({source_file("tests/data/parity/mini/replay.toml"), "--nproc", "2", "--training.steps",
                      "21", "--training.dataset_path", source_file("tests/data/parity/mini"),
                      "--checkpoint.initial_load_path", "/no/weights.safetensors"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("--checkpoint.initial_load_path"),
                                HasSubstr("the 20 steps recorded"), Not(HasSubstr("[rank"))));
}

TEST(Faults, NamesAMissingSharedObject) {
  CommandResult result = try_train({"--experimental.custom_import", "./no/such.so"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr((std::filesystem::current_path() / "no/such.so").string()));
  result = try_train({"--experimental.custom_import", "libnosuch.so"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("LD_LIBRARY_PATH"));
}

TEST(Faults, ExplainsAConfigFileAfterASwitch) {
  CommandResult result = try_train({"--validation.enable", "config.toml"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("config.toml was read as the value of --validation.enable: "
                                    "put the config file first"));
}

// These weights turn out to be unreadable, which is found once everything else is in place.
TEST(Faults, AFailedStartKeepsAnEarlierRunsRecord) {
  auto folder = fresh_folder("run");
  Words words = model() + Words{"--job.dump_folder", folder.string()};
  ASSERT_EQ(try_train(words).status, 0);
  const std::string config = text_of(folder / "config.toml"), metrics = text_of(folder / "metrics.jsonl");
  EXPECT_FALSE(metrics.empty());
  auto weights = fresh_folder("weights") / "no.safetensors";
  std::ofstream(weights) << "nonsense";
  CommandResult result =
      try_train(words + Words{"--checkpoint.enable", "--checkpoint.initial_load_path", weights.string()});
  EXPECT_NE(result.status, 0);
  EXPECT_THAT(result.err, HasSubstr("no.safetensors"));
  EXPECT_EQ(text_of(folder / "config.toml"), config);
  EXPECT_EQ(text_of(folder / "metrics.jsonl"), metrics);
}

TEST(Faults, RefusesOffloadingWithoutAGpu) {
  for (const char* device : {"cpu", "auto"}) {
    CommandResult result =
        try_train(model() + Words{"--training.enable_cpu_offload", "--training.device", device});
    if (result.status == 0 && std::string(device) == "auto") GTEST_SKIP() << "there is a GPU to offload from";
    EXPECT_EQ(result.status, 2) << device;
    EXPECT_THAT(result.err, HasSubstr("offloading to the CPU needs a GPU to offload from")) << device;
  }
}

TEST(Faults, NamesAFolderThatCannotBeCreated) {
  CommandResult result = try_train(model() + Words{"--job.dump_folder", "/proc/titan"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, HasSubstr("/proc/titan"));
}

TEST(Faults, NamesAReadOnlyFolder) {
  using std::filesystem::perms;
  // Root may write anywhere.
  const Words nobody = {"setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"};
  const Words as_user = ::geteuid() == 0 ? nobody : Words{};
  if (run(as_user + Words{"test", "-x", titan_program()}).status != 0)
    GTEST_SKIP() << "a user without rights can't run " << titan_program();
  auto folder = fresh_folder("read_only");
  std::filesystem::permissions(
      folder, perms::owner_read | perms::owner_exec | perms::others_read | perms::others_exec);
  CommandResult result =
      run(as_user + train_words(model()) + Words{"--job.dump_folder", (folder / "run").string()});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, AllOf(HasSubstr("read_only"), HasSubstr("Permission denied")));
}

// A file-size limit fails writes as a full disk does, for every user and without a disk to fill.
TEST(Faults, ReportsAFullDiskForTheLogs) {
  auto folder = fresh_folder("full");
  Words words = train_words(model()) + Words{"--training.steps",  "60",           "--metrics.log_freq", "1",
                                             "--job.dump_folder", folder.string()};
  std::string command = "ulimit -f 8; exec";  // blocks of 1 KiB in bash: config.toml fits, the log doesn't
  for (const std::string& word : words) command += " '" + word + "'";
  CommandResult result = run({"/bin/bash", "-c", command});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, HasSubstr("metrics.jsonl"));
}

CommandResult run_with_file_limit(int kib, const Words& words) {
  std::string command = "(ulimit -f " + std::to_string(kib) + "; exec";
  for (const std::string& word : words) command += " '" + word + "'";
  // Standard error is captured in a file, which the limit must not cut.
  command += ") 2>&1 1>/dev/null | cat >&2; exit ${PIPESTATUS[0]}";
  return run({"/bin/bash", "-c", command}, {{"OMP_NUM_THREADS", "1"}}, 100);
}

// Only rank 0 writes the metrics. Rank 1 notices that rank 0 is gone.
TEST(Faults, AGroupReportsTheCauseOnceAndBlamesItsRank) {
  for (const std::string shown : {"0", "all", "none"}) {
    const CommandResult result = run_with_file_limit(
        8, train_words(model()) + Words{"--training.steps", "1000", "--metrics.log_freq", "1", "--nproc", "2",
                                        "--log-rank", shown, "--job.dump_folder",
                                        fresh_folder("full").string()});
    EXPECT_EQ(result.status, 1) << shown;
    EXPECT_EQ(count_of(result.err, "metrics.jsonl: File too large"), 1) << result.err;
    EXPECT_THAT(result.err, AllOf(HasSubstr("the job fails: cannot write to the log"),
                                  HasSubstr("rank 0 of 2 failed first: exit code 1"), Not(HasSubstr("lost:")),
                                  Not(HasSubstr("first to notice"))));
    if (shown == "all")
      EXPECT_THAT(result.err, HasSubstr("this rank ends because rank 0 failed")) << result.err;
  }
}

// All ranks agree that the save failed, and report it in the same words.
TEST(Faults, AGroupReportsAFailedSaveOnce) {
  const CommandResult result = run_with_file_limit(
      100, train_words(model()) + Words{"--training.steps", "1000", "--nproc", "2", "--log-rank", "all",
                                        "--checkpoint.enable", "--checkpoint.interval", "5",
                                        "--job.dump_folder", fresh_folder("full").string()});
  EXPECT_EQ(result.status, 1);
  EXPECT_EQ(count_of(result.err, "rank 0 ("), 1) << result.err;
  EXPECT_EQ(count_of(result.err, "rank_00000.safetensors"), 1) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("the job fails: checkpoint of step 5: rank 0 ("),
                                HasSubstr("rank 0 of 2 failed first: exit code 1")));
}

// Too large a step makes the next loss infinite on every rank: the lowest rank is named, and all ranks report
// it.
TEST(Faults, NonFiniteNumbersStopAllRanks) {
  CommandResult result = try_train(
      model() + Words{"--nproc", "2", "--optimizer.lr", "1e30", "--training.max_norm", "1e30",
                      "--lr_scheduler.warmup_steps", "0", "--job.dump_folder", fresh_folder("run").string()});
  EXPECT_EQ(result.status, 3);
  EXPECT_THAT(result.err, AllOf(HasSubstr("isn't finite"), HasSubstr("rank 0"),
                                HasSubstr("optimizer step was not taken")));
}

/// A run that continues until it is stopped; it is in its steps by now.
Command start_endless_run(const std::string& num_ranks) {
  auto folder = fresh_folder("run");
  Words words = train_words(model()) +
                Words{"--nproc", num_ranks,           "--training.steps", "1000000", "--training.seq_len",
                      "16",      "--job.dump_folder", folder.string()};
  Command job(words, {{"OMP_NUM_THREADS", "1"}});
  for (int i = 0; i < 600 && read_metrics(folder).empty(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  return job;
}

TEST(Faults, CtrlCEndsARunAndItsRanks) {
  Command job = start_endless_run("2");
  std::vector<int> ranks = children_of(job.pid());
  ASSERT_EQ(ranks.size(), 2u);
  job.signal(SIGINT);
  CommandResult result = job.wait(60);
  EXPECT_EQ(result.status, 0) << "the ranks agreed to stop";
  EXPECT_THAT(result.err, HasSubstr("stops the run after step"));
  for (int rank : ranks) EXPECT_NE(::kill(rank, 0), 0) << rank << " is still running";
  EXPECT_THAT(result.err, Not(HasSubstr("failed first")));  // asked to end, not failed
}

TEST(Faults, NamesAKilledRankAndEndsTheJob) {
  Command job = start_endless_run("3");
  std::vector<int> ranks = children_of(job.pid());
  ASSERT_EQ(ranks.size(), 3u);
  ASSERT_EQ(::kill(ranks[1], SIGKILL), 0);
  const auto killed = std::chrono::steady_clock::now();
  CommandResult result = job.wait(30);
  EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(10));
  EXPECT_EQ(result.status, 128 + SIGKILL);
  EXPECT_THAT(result.err, HasSubstr("rank 1 of 3 failed first"));
}

TEST(Faults, ALaunchedRankDoesNotStartRanks) {
  Words words = train_words(model()) + Words{"--nproc", "2"};
  CommandResult result =
      run(words, {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "1"}});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("--nproc"));
}

TEST(Faults, PrintsAConfigWithoutLaunching) {
  Words words = train_words(model()) + Words{"--print-config"};
  CommandResult result = run(words, {{"RANK", "7"}, {"OMPI_COMM_WORLD_SIZE", "2"}});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[training]"));
}

// As in an sbatch script, and in the shell of `srun --pty`.
TEST(Faults, ASlurmShellMayStartRanks) {
  const std::map<std::string, std::string> shared = {
      {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_JOB_ID", "1"}, {"OMP_NUM_THREADS", "1"}};
  Command::Variables script = shared, shell = shared;
  script.insert({{"SLURM_NTASKS", "8"}, {"SLURM_STEP_ID", ""}});
  shell.insert({{"SLURM_NTASKS", "8"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_STEP_ID", "0"}});
  for (const auto& variables : {script, shell}) {
    CommandResult result =
        run(train_words(model()) + Words{"--nproc", "2", "--job.dump_folder", fresh_folder("run").string()},
            variables);
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("2 rank(s)"));
  }
}

TEST(Faults, NamesUnknownCommandsAndOptions) {
  CommandResult command = run({titan_program(), "trian"});
  EXPECT_EQ(command.status, 2);
  EXPECT_THAT(command.err, HasSubstr("did you mean 'train'"));
  CommandResult option = try_train({"--nprocs", "2"});
  EXPECT_EQ(option.status, 2);
  EXPECT_THAT(option.err, HasSubstr("--nprocs"));
}

}  // namespace
}  // namespace titan::testing
