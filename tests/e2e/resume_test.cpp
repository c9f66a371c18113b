// A run that stops and resumes is the same run: bit-equal on the same ranks, within rounding on others.

#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

constexpr double kRounding = 1e-5;

struct ResumeLayout {
  const char* name;
  Words words;
};
void PrintTo(const ResumeLayout& layout, std::ostream* out) { *out << layout.name; }

Words pipeline(int degree) {
  return {"--training.local_batch_size", "4", "--parallelism.pipeline_parallel_degree",
          std::to_string(degree)};
}
Words v_schedule(const std::string& name) {
  return pipeline(2) + Words{"--parallelism.pipeline_parallel_schedule", name};
}

class SameRanks : public ::testing::TestWithParam<ResumeLayout> {};

// Interrupts the run two and three times, to catch faults that show only after a second resume.
TEST_P(SameRanks, ResumeBitEqual) {
  const Words words = resumable(fresh_folder("config")) + GetParam().words;
  const auto straight = fresh_folder("straight");
  train(straight, words);
  const Curve expected = curve_of(straight);
  ASSERT_EQ(expected.size(), 20u);
  const std::string weights = bytes_of(step_folder(straight, 20) / "model.safetensors");
  ASSERT_GT(weights.size(), 100'000u);
  for (const std::vector<int>& stops : {std::vector<int>{10}, std::vector<int>{5, 10, 15}}) {
    const auto run = fresh_folder("run");
    for (const int stop : stops) train(run, part_of_run(words, stop));
    EXPECT_THAT(train_log(run, words), HasSubstr("resuming after step " + std::to_string(stops.back())));
    EXPECT_EQ(curve_of(run), expected) << stops.size() << " interruptions";
    EXPECT_TRUE(bytes_of(step_folder(run, 20) / "model.safetensors") == weights)
        << stops.size() << " interruptions";
  }
}

INSTANTIATE_TEST_SUITE_P(Resume, SameRanks,
                         ::testing::Values(ResumeLayout{"OneRank", {}}, ResumeLayout{"Fsdp2", ranks(2)},
                                           ResumeLayout{"Uneven3", ranks(3)},
                                           ResumeLayout{"Tp2", ranks(2, kTensor2)},
                                           ResumeLayout{"Pp2", ranks(2, pipeline(2))},
                                           ResumeLayout{"Hsdp4", ranks(4, kReplicate2)}),
                         [](const auto& info) { return std::string(info.param.name); });

struct Chain {
  const char* name;
  std::vector<Words> parts;
  Words model = {};  ///< settings of all parts
};
void PrintTo(const Chain& chain, std::ostream* out) { *out << chain.name; }

class OtherRanks : public ::testing::TestWithParam<Chain> {};

TEST_P(OtherRanks, ResumeWithinRounding) {
  const Words words = resumable(fresh_folder("config")) + GetParam().model;
  const auto straight = fresh_folder("straight"), run = fresh_folder("run");
  train(straight, words);
  const Curve expected = curve_of(straight);
  int steps = 0;
  for (const Words& part : GetParam().parts) {
    const std::string log = train_log(run, part_of_run(words + part, steps + 5));
    if (steps > 0) EXPECT_THAT(log, HasSubstr("random numbers are reseeded"));
    steps += 5;
  }
  const Curve found = curve_of(run);
  ASSERT_EQ(found.size(), 20u);
  for (const auto& [step, numbers] : expected) {
    EXPECT_NEAR(found.at(step)[0], numbers[0], kRounding) << "loss of step " << step;
    EXPECT_NEAR(found.at(step)[1], numbers[1], kRounding * numbers[1]) << "grad_norm of step " << step;
    EXPECT_EQ(found.at(step)[2], numbers[2]) << "lr of step " << step;
    EXPECT_EQ(found.at(step)[3], numbers[3]) << "tokens at step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Resume, OtherRanks,
                         ::testing::Values(Chain{"OneFourThreeTwo", {ranks(1), ranks(4), ranks(3), ranks(2)}},
                                           Chain{"DpTpPpCp",
                                                 {ranks(2), ranks(2, kTensor2), ranks(2, pipeline(2)),
                                                  ranks(2, kContext2)}},
                                           Chain{"HsdpToTpWithPp",
                                                 {ranks(4, kReplicate2), ranks(4, pipeline(2) + kTensor2),
                                                  ranks(1), ranks(4, kReplicate2)}},
                                           // One rank has both copies of the tied weight on these schedules.
                                           Chain{"TiedVSchedules",
                                                 {ranks(2, v_schedule("ZBVZeroBubble")), ranks(1),
                                                  ranks(2, v_schedule("DualPipeV")), ranks(2, kTensor2)},
                                                 {"--model.args.tie_embeddings"}}),
                         [](const auto& info) { return std::string(info.param.name); });

// ---- modes of saving

// A rank's file after its header, which holds the run's id.
std::string tensors_of(const std::filesystem::path& file) {
  const std::string bytes = bytes_of(file);
  uint64_t header = 0;
  if (bytes.size() < sizeof header) return "";
  std::memcpy(&header, bytes.data(), sizeof header);
  return bytes.substr(std::min<size_t>(bytes.size(), sizeof header + header));
}

// The files hold the state of their step, whatever training does while they are written.
TEST(Saving, InTheBackgroundWritesTheSameFiles) {
  const Words words = part_of_run(resumable(fresh_folder("config")), 6) +
                      Words{"--checkpoint.interval", "1", "--nproc", "2", "--checkpoint.async_mode"};
  const auto expected = fresh_folder("disabled");
  train(expected, words + Words{"disabled"});
  for (const std::string mode : {"async", "async_with_pinned_mem"}) {
    const auto run = fresh_folder(mode);
    train(run, words + Words{mode});
    EXPECT_EQ(curve_of(run), curve_of(expected)) << mode;
    for (int step = 1; step <= 6; ++step)
      for (const std::string rank : {"rank_00000.safetensors", "rank_00001.safetensors"}) {
        const std::string tensors = tensors_of(step_folder(run, step) / rank);
        ASSERT_GT(tensors.size(), 100'000u) << mode << " step " << step << " " << rank;
        EXPECT_TRUE(tensors == tensors_of(step_folder(expected, step) / rank))
            << mode << " step " << step << " " << rank;
      }
  }
}

TEST(Saving, KeepsTheNewest) {
  const auto run = fresh_folder("run");
  train(run, part_of_run(resumable(fresh_folder("config")), 9) +
                 Words{"--checkpoint.interval", "2", "--checkpoint.keep_latest_k", "2"});
  EXPECT_EQ(names_in(run / "checkpoint"), (std::vector<std::string>{".lock", "step-8", "step-9"}));
}

TEST(Saving, FollowsTheFirstStepAndTheLast) {
  const auto run = fresh_folder("run");
  train(run, resumable(fresh_folder("config")) +
                 Words{"--training.steps", "4", "--checkpoint.enable_first_step_checkpoint"});
  EXPECT_EQ(names_in(run / "checkpoint"), (std::vector<std::string>{".lock", "step-1", "step-4"}));
  EXPECT_EQ(names_in(step_folder(run, 1)),
            (std::vector<std::string>{"manifest.json", "rank_00000.safetensors"}));
  EXPECT_EQ(names_in(step_folder(run, 4)),
            (std::vector<std::string>{"model.safetensors", "model_manifest.json"}));
}

// The time that steps wait for a save is reported separately from the steps' own time.
TEST(Saving, IsTimedInTheMetrics) {
  const auto run = fresh_folder("run");
  train(run, part_of_run(resumable(fresh_folder("config")), 6) + Words{"--checkpoint.interval", "2"});
  const Lines rows = read_lines(run / "metrics.jsonl");
  ASSERT_EQ(rows.size(), 6u);
  double after_saves = 0, elsewhere = 0;
  for (const auto& row : rows) {
    const int64_t step = row.at("step");
    const double seconds = row.at("checkpoint_s");
    (step == 3 || step == 5 ? after_saves : elsewhere) += seconds;  // the window after a save
  }
  EXPECT_GT(after_saves, elsewhere);
  const auto off = fresh_folder("off");
  train(off, small_run(fresh_folder("config")) + Words{"--training.steps", "1"});
  EXPECT_FALSE(read_lines(off / "metrics.jsonl").at(0).contains("checkpoint_s"));
}

// ---- loading

TEST(Loading, ResumesFromANamedStep) {
  const Words words = resumable(fresh_folder("config")) + Words{"--checkpoint.interval", "2"};
  const auto run = fresh_folder("run");
  train(run, part_of_run(words, 8));
  const Curve before = curve_of(run);
  EXPECT_THAT(train_log(run, part_of_run(words, 5) + Words{"--checkpoint.load_step", "4"}),
              AllOf(HasSubstr("resuming after step 4"), HasSubstr("newer steps stay in"),
                    HasSubstr("(6, 8); until this run is past them")));
  const Curve after = curve_of(run);  // rows after step 4 are gone but for the new one
  ASSERT_EQ(after.size(), 5u);
  for (const auto& [step, numbers] : after) EXPECT_EQ(numbers, before.at(step)) << step;
  EXPECT_THAT(train_log(run, words + Words{"--checkpoint.load_step", "3"}, 2),
              AllOf(HasSubstr("checkpoint.load_step = 3"), HasSubstr("there is no "),
                    HasSubstr("the complete steps 2, 4, 5, 6, 8")));
}

TEST(Loading, ContinuesTheRowsOfValidation) {
  const Words words =
      resumable(fresh_folder("config")) + Words{"--validation.enable", "--validation.freq", "2"};
  const auto straight = fresh_folder("straight"), run = fresh_folder("run");
  train(straight, words + Words{"--training.steps", "8"});
  train(run, part_of_run(words, 7));
  train(run, words + Words{"--training.steps", "8", "--checkpoint.load_step", "5"});
  const Lines found = read_lines(run / "validation.jsonl"),
              expected = read_lines(straight / "validation.jsonl");
  ASSERT_EQ(found.size(), 5u);  // after 1, 2, 4, 6, 8
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].at("step"), expected[i].at("step"));
    EXPECT_EQ(found[i].at("loss"), expected[i].at("loss"));
  }
}

Words without(const std::string& keys) { return {"--checkpoint.exclude_from_loading", keys}; }

TEST(Loading, ExcludedPartsStartFromScratch) {
  const Words words = resumable(fresh_folder("config"));
  const auto whole = fresh_folder("whole");
  train(whole, part_of_run(words, 6));
  const Curve before = curve_of(whole);
  const auto go_on = [&](const std::string& keys) {
    const auto run = fresh_folder("run");
    std::filesystem::create_directory(run / "checkpoint");
    std::filesystem::copy(step_folder(whole, 5), step_folder(run, 5),
                          std::filesystem::copy_options::recursive);
    EXPECT_THAT(train_log(run, part_of_run(words, 6) + without(keys)), HasSubstr("not loaded: "));
    return curve_of(run);
  };
  // Only the schedule restarts: the same batch and so the same loss, at the first step's rate.
  EXPECT_EQ(go_on("lr_scheduler").at(6)[0], before.at(6)[0]);
  EXPECT_EQ(go_on("lr_scheduler").at(6)[2], before.at(1)[2]);
  // Only the data restart: the loss of the first step's batch, which the model has learned by now.
  EXPECT_NE(go_on("dataloader").at(6)[0], before.at(6)[0]);
  EXPECT_LT(go_on("dataloader").at(6)[0], before.at(1)[0]);
  EXPECT_EQ(go_on("dataloader").at(6)[2], before.at(6)[2]);
  // Only the count of steps restarts.
  const Curve counted_anew = go_on("train_state");
  EXPECT_EQ(counted_anew.size(), 6u);
  EXPECT_EQ(counted_anew.at(1)[0], before.at(6)[0]);
}

TEST(Loading, RefusesPartsThatCannotBeExcluded) {
  const Words words = resumable(fresh_folder("config"));
  const auto run = fresh_folder("run");
  EXPECT_THAT(train_log(run, words + without("model"), 2), HasSubstr("the model can't be excluded"));
  EXPECT_THAT(train_log(run, words + without("optimizer"), 2), HasSubstr("exclude lr_scheduler as well"));
  EXPECT_THAT(train_log(run, words + without("data_loader"), 2),
              AllOf(HasSubstr("known: model, optimizer, lr_scheduler, dataloader, train_state, rng"),
                    HasSubstr("did you mean 'dataloader'?")));
}

TEST(Loading, StartsFromAStepOfAnotherRun) {
  const Words words = resumable(fresh_folder("config"));
  const auto first = fresh_folder("first");
  train(first, part_of_run(words, 6));
  const Curve before = curve_of(first);
  const Words from = words + Words{"--checkpoint.initial_load_path", step_folder(first, 5).string()};
  const auto model = fresh_folder("model");
  EXPECT_THAT(train_log(model, part_of_run(from, 1)), HasSubstr("initial weights come from"));
  EXPECT_EQ(curve_of(model).at(1)[2], before.at(1)[2]);  // the schedule's first rate
  EXPECT_LT(curve_of(model).at(1)[0], before.at(1)[0]);  // and the weights of step 5
  const auto whole = fresh_folder("whole");
  train(whole, part_of_run(from, 6) + Words{"--checkpoint.no_initial_load_model_only"});
  EXPECT_EQ(curve_of(whole), (Curve{{6, before.at(6)}}));
  // Now the run has its own steps.
  EXPECT_THAT(train_log(whole, part_of_run(from, 7)), HasSubstr("checkpoint.initial_load_path isn't used"));
  const Words from_gone = words + Words{"--checkpoint.initial_load_path", (first / "gone").string()};
  EXPECT_THAT(train_log(whole, part_of_run(from_gone, 8)),
              HasSubstr("checkpoint.initial_load_path isn't used"));
  EXPECT_THAT(train_log(fresh_folder("no"),
                        words + Words{"--checkpoint.initial_load_path", (first / "checkpoint").string()}, 2),
              HasSubstr("it holds steps, name one of them: step-5, step-6"));
}

// TorchTitan checks whether the folder exists.
TEST(Loading, LoadsInitialWeightsIfTheRunsFolderIsEmpty) {
  const Words words = resumable(fresh_folder("config"));
  const auto first = fresh_folder("first"), run = fresh_folder("run");
  train(first, part_of_run(words, 5));
  std::filesystem::create_directories(run / "checkpoint");
  EXPECT_THAT(train_log(run, part_of_run(words, 1) +
                                 Words{"--checkpoint.initial_load_path", step_folder(first, 5).string()}),
              HasSubstr("initial weights come from"));
}

TEST(Loading, ResumesFromTheLastStateOfARunThatEndedWithTheModel) {
  const Words words = resumable(fresh_folder("config"));
  const auto run = fresh_folder("run");
  train(run, words + Words{"--training.steps", "7"});
  EXPECT_THAT(train_log(run, words),
              AllOf(HasSubstr("step-7 holds only a model"), HasSubstr("resuming after step 5")));
  EXPECT_EQ(curve_of(run).size(), 20u);
}

// A run that doesn't save leaves the records of the run that did unchanged.
TEST(Loading, WorksWithoutSaving) {
  const Words words = resumable(fresh_folder("config"));
  const auto run = fresh_folder("run");
  train(run, part_of_run(words, 5));
  const Curve before = curve_of(run);
  const std::string config = bytes_of(run / "config.toml");
  train_log(run, words + Words{"--checkpoint.load_only", "--checkpoint.interval", "1"});
  EXPECT_EQ(curve_of(run), before);
  EXPECT_EQ(bytes_of(run / "config.toml"), config);
  EXPECT_EQ(curve_of(run / "load_only").size(), 15u);
  EXPECT_EQ(names_in(run / "checkpoint"), (std::vector<std::string>{".lock", "step-5"}));
}

// A requeued job neither repeats its last interval nor writes its result twice.
TEST(Loading, ReportsThatARunHasEnded) {
  const Words words = resumable(fresh_folder("config")) + Words{"--training.steps", "7"};
  const auto run = fresh_folder("run");
  train(run, words);
  const auto written = std::filesystem::last_write_time(step_folder(run, 7) / "model.safetensors");
  const Curve before = curve_of(run);
  EXPECT_THAT(train_log(run, words + ranks(2)),
              AllOf(HasSubstr("this run is complete"), HasSubstr("raise training.steps")));
  EXPECT_EQ(std::filesystem::last_write_time(step_folder(run, 7) / "model.safetensors"), written);
  EXPECT_EQ(curve_of(run), before);
  EXPECT_THAT(train_log(run, words + Words{"--checkpoint.load_step", "5"}),
              HasSubstr("resuming after step 5"));
}

TEST(Loading, ReportsWhatHasChanged) {
  const Words words = resumable(fresh_folder("config"));
  const auto run = fresh_folder("run");
  train(run, part_of_run(words, 5));
  const CommandResult other =
      try_train(part_of_run(words, 6) + Words{"--optimizer.lr", "0.003", "--metrics.log_freq", "1",
                                              "--job.dump_folder", run.string()},
                100, /*threads=*/2);
  EXPECT_EQ(other.status, 0) << other.err;
  EXPECT_THAT(other.err,
              AllOf(HasSubstr("the checkpoint is from a run with 1 thread(s) per operation, this one has 2"),
                    HasSubstr("settings differ from the checkpoint's"), HasSubstr("; training.steps: 5 | 6"),
                    HasSubstr("| 0.003")));
  EXPECT_THAT(other.err, ::testing::Not(HasSubstr("dump_folder:")));
}

TEST(Loading, LoadsASeedOfOneRankOnTwo) {
  const Words words = resumable(fresh_folder("config")) + Words{"--training.steps", "3"};
  const auto run = fresh_folder("run"), plain = fresh_folder("plain");
  train_log(run, words + Words{"--checkpoint.create_seed_checkpoint", "--debug.seed", "7"});
  EXPECT_EQ(names_in(run / "checkpoint"), (std::vector<std::string>{".lock", "step-0"}));
  EXPECT_THAT(train_log(run, words + without("data_loader"), 2), HasSubstr("did you mean 'dataloader'?"));
  EXPECT_THAT(train_log(run, words + ranks(2)), HasSubstr("initial weights come from"));
  train(plain, words + Words{"--debug.seed", "7"});
  EXPECT_NEAR(curve_of(run).at(1)[0], curve_of(plain).at(1)[0], kRounding);
  EXPECT_THAT(train_log(fresh_folder("no"), words + ranks(2, {"--checkpoint.create_seed_checkpoint"}), 2),
              HasSubstr("needs exactly one rank"));
}

// Dropout draws from LibTorch's generators, which are part of the state too.
TEST(Loading, RandomNumbersContinue) {
  const auto config = fresh_folder("config");
  const Words words = {source_file("docs/examples/custom_model/ngram.toml"),
                       "--experimental.custom_import",
                       std::string(TITAN_BINARY_DIR) + "/lib/libngram.so",
                       "--model.args.dropout",
                       "0.5",
                       "--training.dataset",
                       "text",
                       "--training.dataset_path",
                       write_text(config),
                       "--training.steps",
                       "8",
                       "--lr_scheduler.total_steps",
                       "8",
                       "--metrics.log_freq",
                       "1",
                       "--checkpoint.enable",
                       "--checkpoint.interval",
                       "4",
                       "--nproc",
                       "2"};
  const auto straight = fresh_folder("straight"), run = fresh_folder("run");
  train(straight, words);
  const Curve expected = curve_of(straight);
  ASSERT_EQ(expected.size(), 8u);
  train(run, part_of_run(words, 4));
  train(run, words);
  EXPECT_EQ(curve_of(run), expected);
  // They make a difference.
  EXPECT_THAT(train_log(run, words + without("rng") + Words{"--checkpoint.load_step", "4"}),
              HasSubstr("not loaded: rng"));
  EXPECT_EQ(curve_of(run).at(4), expected.at(4));
  EXPECT_NE(curve_of(run).at(5), expected.at(5));
}

TEST(Loading, RestoresAnObjectOfTheUser) {
  const std::string library = std::string(TITAN_BINARY_DIR) + "/lib/libsaved_object.so";
  const Words words = resumable(fresh_folder("config")) + ranks(2),
              more = words + Words{"--experimental.custom_import", library};
  const auto run = fresh_folder("run");
  train(run, part_of_run(more, 10));
  // Two saves. A job on GPUs also asks for the state before the first one, to reserve memory.
  EXPECT_THAT(train_log(run, part_of_run(more, 11)),
              ::testing::AnyOf(HasSubstr("the counter stood at 2, and in its tensor at 2"),
                               HasSubstr("the counter stood at 3, and in its tensor at 3")));
  // Loads a state without the object, and a state with it into a run that lacks it.
  EXPECT_THAT(train_log(run, words, 2), HasSubstr("save_counter"));
  const auto older = fresh_folder("older");
  train(older, part_of_run(words, 5));
  EXPECT_THAT(train_log(older, more, 2), HasSubstr("save_counter"));
  EXPECT_THAT(train_log(older, more + without("save_counter")), HasSubstr("resuming after step 5"));
}

TEST(Loading, ReportsOtherDataUnlessExcluded) {
  const Words words = resumable(fresh_folder("config"));
  const auto run = fresh_folder("run");
  train(run, part_of_run(words, 5));
  const Words other = words + Words{"--training.dataset_path", source_file("README.md")};
  const auto metrics = bytes_of(run / "metrics.jsonl");
  EXPECT_THAT(train_log(run, other, 2),
              AllOf(HasSubstr("the data have changed"), HasSubstr("exclude_from_loading = [\"dataloader\"]"),
                    Not(HasSubstr("halfway"))));
  EXPECT_EQ(bytes_of(run / "metrics.jsonl"), metrics);
  EXPECT_EQ(names_in(run / "checkpoint"), (std::vector<std::string>{".lock", "step-5"}));
  EXPECT_THAT(train_log(run, other + without("dataloader")), HasSubstr("resuming after step 5"));
}

int count_in(const std::string& log, const std::string& text) {
  int count = 0;
  for (size_t at = log.find(text); at != log.npos; at = log.find(text, at + 1)) ++count;
  return count;
}

TEST(Loading, OneRankReadsJsonLinesForAll) {
  const auto config = fresh_folder("config"), run = fresh_folder("run");
  const auto lines = config / "lines.jsonl";
  std::ofstream file(lines);
  for (int i = 0; i < 200; ++i) file << "{\"text\": \"document number " << i << "\"}\n";
  file.close();
  const Words words = resumable(config) + ranks(3) +
                      Words{"--training.dataset", "jsonl", "--training.dataset_path", lines.string()};
  EXPECT_EQ(count_in(train_log(run, part_of_run(words, 5)), "indexed 200 documents"), 1);
  const std::string resumed = train_log(run, part_of_run(words, 6));
  EXPECT_THAT(resumed, HasSubstr("resuming after step 5"));
  EXPECT_EQ(count_in(resumed, "indexed"), 0);
  // The error of the rank that reads them is all ranks' error, at once.
  std::ofstream(lines, std::ios::app) << "{\"text\": 7}\n";
  const std::string refused = train_log(fresh_folder("refused"), words, 2);
  EXPECT_THAT(refused, HasSubstr("lines.jsonl:201: member 'text' is not a string"));
}

}  // namespace
}  // namespace titan::testing
