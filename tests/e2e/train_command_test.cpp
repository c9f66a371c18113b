// The help, printed config, logs and comparisons of `titan train` and `titan compare`.

#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "e2e/small_run.h"

namespace titan::testing {
namespace {

Words model(const std::string& steps) {
  return {source_file("docs/examples/custom_model/ngram.toml"),
          "--experimental.custom_import",
          std::string(TITAN_BINARY_DIR) + "/lib/libngram.so",
          "--training.steps",
          steps,
          "--metrics.log_freq",
          "1"};
}

TEST(TrainCommand, HelpListsEverySetting) {
  CommandResult result = try_train({"--help"});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.out, AllOf(HasSubstr("--training.seq_len int"), HasSubstr("--optimizer.lr float"),
                                HasSubstr("--comm.backend"), HasSubstr("--model.args.")));
}

TEST(TrainCommand, CheckReportsAllFindingsAndStartsNothing) {
  const fs::path folder = fresh_folder("run");
  const auto check = [&](const Words& words) {
    return try_train(model("2") + words + Words{"--check", "--job.dump_folder", (folder / "run").string()});
  };
  const CommandResult sound = check({"--nproc", "2"});
  EXPECT_EQ(sound.status, 0) << sound.err;
  EXPECT_THAT(sound.out,
              AllOf(HasSubstr("on 2 rank(s)"), HasSubstr("starts with random weights"),
                    HasSubstr("memory of rank 0"), HasSubstr("nothing keeps this job from starting")));
  EXPECT_FALSE(fs::exists(folder / "run"));

  std::ofstream(folder / "file") << "not a folder";
  const CommandResult wrong =
      check({"--model.hf_assets_path", "nowhere", "--training.dataset", "c4", "--fault_tolerance.requeue_on",
             "SIGUSR1", "--training.local_batch_size", "100000000"});
  EXPECT_EQ(wrong.status, 2);
  EXPECT_THAT(wrong.err,
              AllOf(ContainsRegex("there is no .*nowhere"), HasSubstr("unknown data set"), HasSubstr("SLURM"),
                    HasSubstr(tests_on_gpu() ? "but this GPU has" : "memory: the 1 rank(s)")));
  std::ofstream(folder / "empty.parquet");
  EXPECT_THAT(
      check({"--training.dataset", "text", "--training.dataset_path", (folder / "empty.parquet").string()})
          .err,
      HasSubstr("is a Parquet file"));
  if (!tests_on_gpu()) EXPECT_THAT(check({"--comm.backend", "nccl"}).err, HasSubstr("nccl' needs a GPU"));
  const CommandResult unwritable =
      try_train(model("2") + Words{"--check", "--job.dump_folder", (folder / "file" / "run").string()});
  EXPECT_EQ(unwritable.status, 2);
  EXPECT_THAT(unwritable.err, HasSubstr("job.dump_folder"));
}

TEST(TrainCommand, CheckComparesTheStateToResumeFrom) {
  const fs::path folder = fresh_folder("run");
  const Words words = {"--checkpoint.enable", "--checkpoint.no_last_save_model_only"};
  const auto check = [&](const char* steps, const Words& more) {
    return try_train(model(steps) + words + more + Words{"--check", "--job.dump_folder", folder.string()});
  };
  train(folder, model("2") + words);
  EXPECT_THAT(check("2", {}).out, HasSubstr("the run is complete"));
  const CommandResult sound = check("4", {});
  EXPECT_EQ(sound.status, 0) << sound.err;
  EXPECT_THAT(sound.out, HasSubstr("resumes from " + (folder / "checkpoint/step-2").string()));
  const CommandResult other = check("4", {"--model.args.hidden", "128"});
  EXPECT_EQ(other.status, 2);
  EXPECT_THAT(other.err, AllOf(HasSubstr("was saved with another model"), HasSubstr("model.args.hidden")));
  const Words other_data = {"--data.piece_bytes", "4096"};
  const CommandResult data = check("4", other_data);
  EXPECT_EQ(data.status, 2);
  EXPECT_THAT(data.err, AllOf(HasSubstr("the data have changed"), HasSubstr("is now '4096 bytes")));
  EXPECT_EQ(check("4", other_data + Words{"--checkpoint.exclude_from_loading", "dataloader"}).status, 0);
  const fs::path seed = fresh_folder("seed");
  const Words seeded = model("4") + words + Words{"--job.dump_folder", seed.string()};
  EXPECT_EQ(try_train(seeded + Words{"--checkpoint.create_seed_checkpoint"}).status, 0);
  EXPECT_EQ(try_train(seeded + Words{"--check"}).status, 0);
  const CommandResult missing = check("4", {"--checkpoint.load_step", "3"});
  EXPECT_EQ(missing.status, 2);
  EXPECT_THAT(missing.err, HasSubstr("there are the complete steps 2"));
}

TEST(TrainCommand, PlanNamesAMissingTokenizer) {
  const CommandResult result =
      try_train(model("2") + Words{"--print-plan", "--model.hf_assets_path", "nowhere"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("size of the vocabulary: unknown"), ContainsRegex("there is no .*nowhere")));
  EXPECT_THAT(try_train(model("2") + Words{"--print-plan"}).out, Not(HasSubstr("unknown")));
}

// The last lines of a run's log: report, compare and resume, as a shell reads them.
Words commands_in(const std::string& log) {
  std::istringstream lines(log.substr(std::min(log.size(), log.find("the run's files are in"))));
  Words commands;
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("  ")) commands.push_back(line.substr(2));
  return commands;
}

TEST(TrainCommand, EndsWithCommandsThatWorkWhenPasted) {
  const fs::path folder = fresh_folder("run with 'quotes'");
  const auto end_of = [&](const Words& words) {
    const CommandResult result = try_train(model("2") + words);
    EXPECT_EQ(result.status, 0) << result.err;
    const Words commands = commands_in(result.err);
    EXPECT_EQ(commands.size(), 3u) << result.err;
    return commands;
  };
  const auto paste = [&](const std::string& command) {
    const CommandResult result = run({"/bin/sh", "-c", command}, {{"OMP_NUM_THREADS", "1"}});
    EXPECT_EQ(result.status, 0) << command << "\n" << result.err;
    return result.out + result.err;
  };
  const Words first = end_of({"--job.dump_folder", (folder / "a").string(), "--checkpoint.enable",
                              "--checkpoint.no_last_save_model_only"});
  EXPECT_THAT(first[0], HasSubstr(" report "));
  paste(first[0]);
  EXPECT_THAT(paste(first[1]), HasSubstr("optimizer.lr"));
  EXPECT_THAT(paste(first[2]), AllOf(HasSubstr("resuming after step 2"), HasSubstr("step:  4")));
  const Words second = end_of({"--job.dump_folder", (folder / "b").string()});
  EXPECT_THAT(second[1], AllOf(HasSubstr(" compare "), Not(HasSubstr("&&"))));
  paste(second[1]);
  EXPECT_THAT(second[2], HasSubstr(" --checkpoint.enable"));
}

TEST(TrainCommand, CommandToResumeKeepsTheRestarts) {
  const fs::path folder = fresh_folder("run");
  const CommandResult result =
      try_train(model("2") + Words{"--job.dump_folder", folder.string(), "--checkpoint.enable", "--nproc",
                                   "1", "--max-restarts", "2"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr(" --nproc 1 --max-restarts 2"));
}

// The commands are relative to the working directory, which somebody removes during the run.
TEST(TrainCommand, SucceedsIfItsLastLinesCantBeWritten) {
  const fs::path folder = fresh_folder("run");
  fs::create_directories(folder / "gone");
  std::string command = "cd '" + (folder / "gone").string() + "'\n'" + titan_program() + "' train";
  for (const std::string& word : model("1000000") + Words{"--job.dump_folder", (folder / "run").string()})
    command += " '" + word + "'";
  command +=
      " &\nwhile kill -0 $! && [ ! -s ../run/metrics.jsonl ]; do sleep 0.05; done\n"
      "rmdir ../gone; kill -TERM $!; wait $!";
  const CommandResult result = run({"/bin/sh", "-c", command}, {{"OMP_NUM_THREADS", "1"}});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("the commands that report and continue this run can't be named"));
}

TEST(TrainCommand, PrintedConfigReadsBack) {
  Words overrides = {"--optimizer.lr",       "1.25e-7", "--job.description", "a \"quoted\" word",
                     "--model.args.context", "3"};
  CommandResult first = try_train(model("7") + overrides + Words{"--print-config"});
  ASSERT_EQ(first.status, 0) << first.err;
  auto path = fresh_folder("config") / "printed.toml";
  std::ofstream(path) << first.out;
  CommandResult second = try_train({path.string(), "--print-config"});
  EXPECT_EQ(second.status, 0) << second.err;
  EXPECT_EQ(second.out, first.out);
}

TEST(TrainCommand, SavedConfigRepeatsTheRun) {
  auto folder = fresh_folder("run");
  auto first = train(folder, model("3"));
  auto again = train(fresh_folder("again"), {(folder / "config.toml").string()});
  EXPECT_EQ(losses(again), losses(first));
}

TEST(TrainCommand, ASecondRunInAFolderKeepsTheFirstOnesRecords) {
  const auto folder = fresh_folder("run");
  const auto text_of = [&](const char* name) {
    std::ifstream stream(folder / name);
    return std::string(std::istreambuf_iterator<char>(stream), {});
  };
  train(folder, model("3"));
  const std::string config = text_of("config.toml"), metrics = text_of("metrics.jsonl");
  train(folder, model("3") + Words{"--optimizer.lr", "1e-5"});
  EXPECT_EQ(text_of("config.1.toml"), config);
  EXPECT_EQ(text_of("metrics.1.jsonl"), metrics);
  train(folder, model("3") + Words{"--optimizer.lr", "1e-5"});
  EXPECT_FALSE(std::filesystem::exists(folder / "config.2.toml")) << "the settings are the same";
}

TEST(TrainCommand, LogsAllNumbersOfEveryStep) {
  auto folder = fresh_folder("run");
  train(folder, model("2"));
  std::ifstream file(folder / "metrics.jsonl");
  std::string line;
  for (int step = 1; std::getline(file, line); ++step) {
    auto object = nlohmann::json::parse(line);
    for (const char* key : {"step", "loss", "grad_norm", "lr", "tps", "tflops", "mfu", "memory_gib",
                            "data_loading_s", "step_s", "n_tokens_seen"})
      EXPECT_TRUE(object.contains(key)) << key;
    for (const char* key : {"loss", "grad_norm", "lr", "tps", "tflops", "memory_gib", "step_s"})
      EXPECT_GT(object[key].is_number() ? object[key].get<double>() : 0, 0) << key;
    EXPECT_GE(object["data_loading_s"].get<double>(), 0);
    EXPECT_LT(object["data_loading_s"].get<double>(), object["step_s"].get<double>() + 1);
    if (!tests_on_gpu()) EXPECT_TRUE(object["mfu"].is_null());  // a CPU's peak is unknown
    EXPECT_EQ(object["n_tokens_seen"], step * 4 * 128);
    EXPECT_EQ(object.contains("startup_s"), step == 1);
  }
}

TEST(TrainCommand, ValidationGoesToItsOwnFile) {
  auto folder = fresh_folder("run");
  auto steps = train(folder, model("2") + Words{"--validation.enable", "--validation.seq_len", "64",
                                                "--validation.steps", "2", "--validation.freq", "2"});
  EXPECT_EQ(steps.size(), 2u);
  std::istringstream lines(text_of(folder / "validation.jsonl"));
  std::vector<double> found;
  for (std::string line; std::getline(lines, line);) found.push_back(nlohmann::json::parse(line).at("loss"));
  ASSERT_EQ(found.size(), 2u);
  EXPECT_LT(found[1], found[0]);
}

// Three ranks share ten documents, so some finish before others.
TEST(TrainCommand, ValidatesAWholeSetTheSameOnAnyNumberOfRanks) {
  auto set = fresh_folder("set");
  for (int i = 0; i < 10; ++i)
    std::ofstream(set / (std::to_string(i) + ".txt")) << std::string(static_cast<size_t>(30 + 97 * i), 'x');
  std::vector<double> found;
  for (const char* ranks : {"1", "3"}) {
    auto folder = fresh_folder(ranks);
    train(folder, model("1") + Words{"--nproc", ranks, "--training.local_batch_size", "2",
                                     "--training.global_batch_size", "4", "--validation.enable",
                                     "--validation.dataset", "text", "--validation.dataset_path",
                                     set.string(), "--validation.seq_len", "32",
                                     "--validation.local_batch_size", "1", "--validation.steps", "-1"});
    found.push_back(nlohmann::json::parse(text_of(folder / "validation.jsonl")).at("loss"));
  }
  EXPECT_NEAR(found[0], found[1], 0.02);  // packed into one lane and into three
}

TEST(TrainCommand, LastStepWritesALoadableModel) {
  auto folder = fresh_folder("run");
  auto written = train(folder, model("3") + Words{"--checkpoint.enable"});
  auto file = folder / "checkpoint" / "step-3" / "model.safetensors";
  ASSERT_TRUE(std::filesystem::exists(file));
  auto first = train(fresh_folder("a"), model("2") + Words{"--checkpoint.enable",
                                                           "--checkpoint.initial_load_path", file.string()});
  auto second = train(fresh_folder("b"),
                      model("2") + Words{"--checkpoint.enable", "--checkpoint.initial_load_path",
                                         file.string(), "--nproc", "2", "--training.local_batch_size", "2"});
  ASSERT_EQ(first.size(), 2u);
  EXPECT_NEAR(first[0].loss, second[0].loss, 5e-6);
  EXPECT_LT(first[0].loss, written[0].loss - 0.05);  // the same tokens, after three steps of training
}

TEST(TrainCommand, WritesOtherRanksMetricsBesideRankZeros) {
  auto folder = fresh_folder("run");
  auto zero = train(folder, model("2") + Words{"--nproc", "2", "--metrics.save_for_all_ranks"});
  EXPECT_EQ(zero.size(), 2u);
  EXPECT_EQ(losses(read_metrics(folder / "rank_1")), losses(zero));
  EXPECT_FALSE(std::filesystem::exists(folder / "rank_0"));
}

TEST(TrainCommand, ReportsTheMemoryOfKeptGradientsOnce) {
  const Words accumulation = {
      "--nproc", "2", "--training.local_batch_size", "1", "--training.global_batch_size", "4"};
  const auto log_of = [&](const Words& words) {
    return try_train(model("2") + accumulation + words +
                     Words{"--job.dump_folder", fresh_folder("run").string()})
        .err;
  };
  const std::string told = "whole gradients stay between micro-batches: ";
  EXPECT_THAT(log_of({}), AllOf(HasSubstr("step:  2"), Not(HasSubstr(told))));

  const std::string log = log_of({"--parallelism.no_fsdp_reduce_every_micro_batch"});
  EXPECT_THAT(log, HasSubstr("step:  2"));
  std::smatch parameters, kept;
  ASSERT_TRUE(std::regex_search(log, parameters, std::regex("([0-9]+) parameters, on 2 rank"))) << log;
  ASSERT_TRUE(std::regex_search(log, kept, std::regex(told + "([0-9.]+) MiB on each rank"))) << log;
  EXPECT_EQ(log.find(told), log.rfind(told));
  // fp32, plus a little for parts of equal size.
  const double whole = 4 * std::stod(parameters[1]);
  EXPECT_GE(std::stod(kept[1]) * 1024 * 1024, 0.999 * whole);
  EXPECT_LE(std::stod(kept[1]) * 1024 * 1024, 1.05 * whole);
}

/// The output of `titan train words...` on its own terminal.
std::string train_on_terminal(const Words& words) {
  const Words command = train_words(words);
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  int terminal = -1;
  const pid_t pid = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (pid == 0) {
    setenv("OMP_NUM_THREADS", "1", 1);
    execv(arguments[0], arguments.data());
    _exit(127);
  }
  EXPECT_GT(pid, 0) << "forkpty";
  std::string shown;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  std::array<char, 4096> bytes;
  pollfd readable{terminal, POLLIN, 0};
  while (std::chrono::steady_clock::now() < end) {
    if (poll(&readable, 1, 1000) == 0) continue;
    const ssize_t count = read(terminal, bytes.data(), bytes.size());
    if (count <= 0) break;  // EIO: nobody has it open any more
    shown.append(bytes.data(), static_cast<size_t>(count));
  }
  if (std::chrono::steady_clock::now() >= end) kill(pid, SIGKILL);
  int status = 0;
  waitpid(pid, &status, 0);
  close(terminal);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << shown;
  return shown;
}

// Also for the ranks of --nproc, whose output is a pipe to their parent.
TEST(TrainCommand, PrintsColorsAndRemainingTimeOnlyOnTerminals) {
  const auto words = [](const char* ranks) {
    return model("3") + Words{"--nproc",
                              ranks,
                              "--training.local_batch_size",
                              "2",
                              "--job.dump_folder",
                              fresh_folder("run").string()};
  };
  const std::string last_steps_progress = "100% 0:00:00 left";
  EXPECT_THAT(train_on_terminal(words("2")),
              AllOf(HasSubstr("\033[31mstep:  3"), HasSubstr(last_steps_progress)));
  EXPECT_THAT(train_on_terminal(words("1") + Words{"--metrics.disable_color_printing"}),
              AllOf(HasSubstr(" step:  3"), Not(HasSubstr("\033")), HasSubstr(last_steps_progress)));
  EXPECT_THAT(try_train(words("2")).err,
              AllOf(HasSubstr(" step:  3"), Not(HasSubstr("\033")), Not(HasSubstr(" left"))));
}

double first_loss(const Words& words) {
  static int count = 0;
  auto steps = train(fresh_folder("run" + std::to_string(count++)), model("1") + words);
  return steps.empty() ? 0 : steps[0].loss;
}

TEST(Seeds, DataOrderFollowsDebugSeedUnlessItHasItsOwn) {
  const Words seed = {"--debug.seed", "7"};
  const double loss = first_loss(seed);
  EXPECT_EQ(first_loss(seed + Words{"--data.seed", "7"}), loss);
  EXPECT_NE(first_loss(seed + Words{"--data.seed", "0"}), loss);  // the same weights, other tokens
  EXPECT_NE(first_loss({"--data.seed", "7"}), loss);              // the same tokens, other weights
  EXPECT_EQ(first_loss({}), first_loss({"--debug.seed", "0", "--data.seed", "0"}));
}

// The same weights and tokens each time: only the numbers that the model itself draws differ.
TEST(Seeds, DropoutRepeatsAndFollowsDebugSeed) {
  auto folder = fresh_folder("weights");
  train(folder, model("1") + Words{"--checkpoint.enable"});
  const std::string weights = (folder / "checkpoint" / "step-1" / "model.safetensors").string();
  auto loss = [&](const char* seed, const char* dropout, const char* ranks) {
    return first_loss({"--checkpoint.enable", "--checkpoint.initial_load_path", weights, "--data.seed", "0",
                       "--training.local_batch_size", "2", "--training.global_batch_size", "4", "--nproc",
                       ranks, "--debug.seed", seed, "--model.args.dropout", dropout});
  };
  for (const char* ranks : {"1", "2"}) {
    const double first = loss("3", "0.2", ranks);
    EXPECT_EQ(first, loss("3", "0.2", ranks)) << ranks << " ranks";
    EXPECT_NE(first, loss("4", "0.2", ranks)) << ranks << " ranks";
    EXPECT_EQ(loss("3", "0", ranks), loss("4", "0", ranks)) << ranks << " ranks";
  }
}

TEST(Compare, ShowsDifferentSettingsAndTheFirstDifferentLoss) {
  auto a = fresh_folder("a"), b = fresh_folder("b"), c = fresh_folder("c");
  train(a, model("4"));
  train(b, model("4") + Words{"--optimizer.lr", "1e-4"});
  train(c, model("4"));
  CommandResult result = run({titan_program(), "compare", a.string(), b.string(), c.string()});
  EXPECT_EQ(result.status, 0) << result.err;
  // The first step's loss doesn't depend on the learning rate.
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("optimizer.lr"), HasSubstr("the losses first differ at step 2"),
                    HasSubstr("all 4 losses are equal, bit for bit"), ContainsRegex("\n +ranks +1 +1 +1\n")));
}

TEST(Compare, NamesAFolderWithoutARun) {
  auto folder = fresh_folder("empty");
  CommandResult result = run({titan_program(), "compare", folder.string(), folder.string()});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("empty"), HasSubstr("holds no run")));
}

TEST(GeneratedDocs, AreUpToDate) {
  for (auto [page, file] :
       {std::pair{"config", "docs/config.md"}, std::pair{"torchtitan-keys", "docs/torchtitan_keys.md"}})
    EXPECT_EQ(run({titan_program(), "docs", page}).out, text_of(source_file(file)))
        << "run scripts/update_docs.sh";
}

// Before the first step and at the end of the run.
TEST(TrainCommand, ReportsHowMuchDataARunReads) {
  const auto folder = fresh_folder("data");
  const Words words =
      small_run(folder) + Words{"--validation.no_enable", "--job.dump_folder", (folder / "run").string()};
  std::string text;
  while (text.size() < 960) text += "lines of text\n";
  std::ofstream(folder / "text.txt") << text.substr(0, 958);
  CommandResult result = try_train(words + Words{"--training.dataset_path", (folder / "text.txt").string()});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("training data: 1 document, 958 bytes, about 960 tokens; 4 steps of 192 tokens "
                              "read them about 0.8 times"),
                    HasSubstr("the run has read 768 tokens, about 0.8 epochs of the training data"),
                    Not(HasSubstr("less than one global batch"))));
  std::ofstream(folder / "text.txt") << "abc";
  result = try_train(words + Words{"--training.dataset_path", (folder / "text.txt").string()});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("the training data are less than one global batch of 192 tokens"));
  std::string latin = text;
  for (size_t i = 0; i < latin.size(); i += 40) latin[i] = '\xfc';
  std::ofstream(folder / "text.txt") << latin;
  result = try_train(words + Words{"--training.dataset_path", (folder / "text.txt").string()});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("about 2.6 % of the training data isn't valid UTF-8"));
  std::ofstream(folder / "training.txt") << text;
  result = try_train(words + Words{"--training.dataset_path", (folder / "training.txt").string(),
                                   "--validation.enable", "--validation.dataset", "text",
                                   "--validation.dataset_path", (folder / "text.txt").string()});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("validation data: 1 document"),
                                HasSubstr("% of the validation data isn't valid UTF-8")));
  std::ofstream(folder / "empty.parquet");
  result = try_train(words +
                     Words{"--training.dataset_path", (folder / "empty.parquet").string(), "--nproc", "2"});
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.err, HasSubstr("empty.parquet is a Parquet file by its name, and empty"));
}

}  // namespace
}  // namespace titan::testing
