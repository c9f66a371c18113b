// A run's folder: rows, settings, and how its processes ended.

#include "cli/run_folder.h"

#include <csignal>
#include <utility>

#include "cli/debug/commands.h"
#include "unit/cli/logged_run.h"

namespace titan::cli {
namespace {

LoggedEvent event(LoggedEvent::Kind kind, const std::string& name, int64_t step, int64_t time_us) {
  return {.kind = kind, .name = name, .time_us = time_us, .value = {}, .step = step};
}

TEST(RunHistory, TellsHowAProcessEnded) {
  using Kind = LoggedEvent::Kind;
  ProcessLog log;
  log.events = {event(Kind::Start, "step", 5, 1'000'000), event(Kind::End, "step", 5, 2'000'000),
                event(Kind::Start, "step", 6, 3'000'000)};
  const RankError other{3, "node7", event(Kind::Error, "fetching_batch", 6, 3'500'000)};
  EXPECT_EQ(end_of(log, 4'000'000'000, {other}).words,
            "an error in fetching_batch of step 6 on rank 3 (node7)");
  EXPECT_EQ(end_of(log, 4'000'000'000, {other}, 3'200'000).kind,
            ProcessEnd::Kind::Silent);  // the error belongs to the next start
  EXPECT_EQ(end_of(log, 4'000'000).words, "running");
  EXPECT_EQ(end_of(log, 304'000'000).words, "silent for 5 min 1 s, in step");
  EXPECT_EQ(end_of(log, 304'000'000).kind, ProcessEnd::Kind::Silent);
  EXPECT_EQ(end_of(log, 4'000'000'000, {}, 5'000'000).words, "killed or lost");  // there is a next process
  ProcessLog failed = log;
  failed.events.push_back(event(Kind::Error, "fwd_bwd", 6, 4'000'000));
  EXPECT_EQ(end_of(failed, 5'000'000).kind, ProcessEnd::Kind::Failed);
  EXPECT_EQ(end_of(failed, 5'000'000).words, "an error in fwd_bwd of step 6");
  EXPECT_EQ(end_of(failed, 5'000'000, {other}).words,
            "an error in fetching_batch of step 6 on rank 3 (node7)");
  log.events.push_back(event(Kind::End, "teardown", 6, 4'000'000));
  EXPECT_EQ(end_of(log, 4'000'000'000).kind, ProcessEnd::Kind::Completed);
  EXPECT_EQ(end_of(log, 4'000'000'000, {other}).kind, ProcessEnd::Kind::Completed);
  LoggedEvent stop = event(Kind::Instant, "stopped", 6, 3'900'000);
  stop.value = SIGTERM;
  log.events.insert(log.events.end() - 1, stop);
  EXPECT_EQ(end_of(log, 4'000'000'000).words, "stopped by SIGTERM");
  ProcessLog torn = log;  // the last save fails
  torn.events.push_back(event(Kind::Error, "teardown", 6, 4'000'000));
  EXPECT_EQ(end_of(torn, 4'000'000'000).words, "an error in teardown of step 6");
}

TEST(RunHistory, CountsTrainedSteps) {
  using Kind = LoggedEvent::Kind;
  ProcessLog log;
  const auto add = [&](Kind kind, const char* name, int64_t step, int64_t relative) {
    log.events.push_back(event(kind, name, step, 0));
    log.events.back().relative_step = relative;
  };
  for (int64_t step = 41; step <= 43; ++step) {  // the log's beginning was rotated away
    add(Kind::Start, "step", step, step - 4);
    if (step < 43) add(Kind::End, "fwd_bwd", step, step - 4);  // in the last step the ranks agree to stop
    add(Kind::End, "step", step, step - 4);
  }
  EXPECT_EQ(steps_of(log).first, 5);
  EXPECT_EQ(steps_of(log).last, 42);
}

TEST(RunHistory, ReadsTheStartTimeFromALogsName) {
  const ProcessFiles files{.rank = 3, .stem = "train.global_rank_3.19700102-000001-000250-abcdef"};
  EXPECT_EQ(start_us(files), 86'401'000'250);
  EXPECT_EQ(start_us({.rank = 3, .stem = "train.global_rank_3.yesterday"}), 0);
}

TEST(RunHistory, LeavesOutRanksThatTheRunNoLongerHas) {
  const LoggedRun run("fewer_ranks");
  for (int rank = 0; rank < 4; ++rank) run.log(rank, "20260101-000000-000000", 4, {"step 5 own_s 9"});
  for (int rank = 0; rank < 3; ++rank) run.log(rank, "20260101-010000-000000", 3, {"step 6 own_s 1"});
  const auto ranks = newest_of_ranks(run.folder, 64, {});
  ASSERT_EQ(ranks.size(), 3u);
  for (const ProcessLog& rank : ranks) EXPECT_EQ(rank.events.back().step, 6);
}

TEST(RunHistory, ExplainsAnEndByAnotherRanksError) {
  const LoggedRun run("others_error");
  const std::vector<std::string> cut = {"step 1 step_start", "step 1 fwd_bwd_start", "step 1 fwd_bwd_end",
                                        "step 1 step_end", "step 2 step_start"};
  run.log(0, "20260101-000000-000000", 2, cut);
  run.log(1, "20260101-000001-000000", 2, {"step 2 fetching_batch_error", "step 2 fetching_batch_end"});
  run.log(0, "20260101-000100-000000", 2, cut);
  run.log(1, "20260101-000100-000000", 2, cut);
  const RunHistory history = read_history(run.folder);
  // The second process begins at step 1 again, so it replaces the first one.
  ASSERT_EQ(history.processes.size(), 1u);
  EXPECT_EQ(end_of(history, 0, history.processes[0].last_us()).words, "running");
  run.log(1, "20260101-000100-000000", 2, {"step 2 optim_error", "step 2 optim_end"});
  const RunHistory failed = read_history(run.folder);
  EXPECT_EQ(end_of(failed, 0, failed.processes[0].last_us()).words,
            "an error in optim of step 2 on rank 1 (node1)");
}

TEST(RunHistory, AFailedStartDoesNotSpoilAFinishedRun) {
  const LoggedRun run("failed_restart");
  std::ofstream(run.folder / "metrics.jsonl") << "{\"step\": 100, \"loss\": 2}\n";
  run.log(0, "20260101-000000-000000", 1,
          {"step 100 step_start", "step 100 fwd_bwd_end", "step 100 teardown_end"});
  run.log(0, "20260101-010000-000000", 1, {"step 0 build_error"});
  RunHistory history = read_history(run.folder);
  ASSERT_EQ(history.processes.size(), 2u);
  const ProcessEnd end = end_of(history, 1, history.processes[1].last_us());
  EXPECT_EQ(end.kind, ProcessEnd::Kind::Failed);
  EXPECT_TRUE(is_failed_restart(end, history.processes[1], history));
  history.settings["training.steps"] = "200";
  EXPECT_FALSE(is_failed_restart(end, history.processes[1], history)) << "the run was to continue";
}

std::vector<std::string> many_steps(int64_t first, int64_t last) {
  std::vector<std::string> lines;
  for (int64_t step = first; step <= last; ++step)
    for (const char* name : {"step_start", "fwd_bwd_start", "fwd_bwd_end 5", "step_end 6"})
      lines.push_back(str("step ", step, " ", name));
  return lines;
}

TEST(RankTails, RememberNumbersFromBeforeTheTail) {
  const LoggedRun run("tails");
  std::vector<std::string> lines = {"step 1 own_s 0.5", "step 1 memory_gib 2"};
  for (const std::string& line : many_steps(2, 40)) lines.push_back(line);
  run.log(0, "20260101-000000-000000", 1, lines);
  RankTails tails(4000, 64);
  const ProcessLog first = tails.read(run.folder).at(0);
  ASSERT_TRUE(first.last("own_s"));
  EXPECT_EQ(first.last("own_s")->value, 0.5);
  EXPECT_EQ(first.last("step")->step, 40);
  EXPECT_LT(first.events.size(), 40u);
  // After a rotation, most of the tail is in the earlier file.
  run.log(0, "20260101-000000-000000", 1, many_steps(2, 40), ".earlier");
  run.log(0, "20260101-000000-000000", 1, many_steps(41, 42));
  const ProcessLog second = tails.read(run.folder).at(0);
  EXPECT_EQ(second.last("step")->step, 42);
  EXPECT_GT(second.events.size(), 12u);
  ASSERT_TRUE(second.last("own_s"));
  EXPECT_EQ(second.last("own_s")->value, 0.5);
}

TEST(RunHistory, ReadsSettingsAsToml) {
  const LoggedRun run("escapes");
  std::ofstream(run.folder / "config.toml") << "[job]\ndescription = \"a \\\"b\\\" \\\\ c\"\n";
  EXPECT_EQ(read_history(run.folder).text_setting("job.description"), "a \"b\" \\ c");
}

TEST(RunHistory, SkipsLinesThatAreNotRows) {
  const auto path = fs::path(::testing::TempDir()) / "bad_rows.jsonl";
  std::ofstream(path)
      << "{\"step\": 1, \"loss\": 3.5}\n{\"step\": 2, \"lo{\"step\": 3}\n{\"step\": 4, \"lr\": 1}\n";
  const MetricRows rows(path);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows.step(1), 4);
  EXPECT_FALSE(rows.value(1, "loss"));
  EXPECT_EQ(rows.value(1, "lr"), 1);
  EXPECT_FALSE(rows.value(0, "lr"));
}

TEST(Perfetto, UsesDurationsOfTheSteadyClock) {
  using Kind = LoggedEvent::Kind;
  ProcessLog log;
  log.environment = nlohmann::ordered_json::object();
  // The wall clock is set back during the span.
  log.events = {event(Kind::Start, "step", 1, 9'000'000), event(Kind::End, "step", 1, 8'000'000)};
  log.events.back().value = 1500.5;
  std::string text;
  bool told = false;
  write_perfetto([&] { return std::exchange(told, true) ? std::nullopt : std::optional(log); },
                 [&](std::string_view part) { text += part; });
  for (const auto& each : nlohmann::json::parse(text).at("traceEvents"))
    if (each.at("ph") == "X") {
      EXPECT_EQ(each.at("dur"), 1'500'500);
      EXPECT_EQ(each.at("ts"), 6'499'500);
    }
  EXPECT_NE(text.find("\"X\""), std::string::npos);
}

TEST(RunHistory, ReadsTheLastRows) {
  const auto path = std::filesystem::path(::testing::TempDir()) / "figure_rows.jsonl";
  std::ofstream(path) << "{\"step\": 1, \"loss\": 3.5}\n{\"step\": 2, \"loss\": null}\n{\"step\": 3, "
                         "\"loss\": 2.5}\n{\"step\": 4, \"lo";
  const MetricRows all(path), tail(path, {.tail_bytes = 40});
  EXPECT_EQ(all.size(), 3u);
  EXPECT_EQ(all.curve("loss"), (Curve{{1, 3.5}, {3, 2.5}}));
  EXPECT_EQ(tail.step(0), 3);
  EXPECT_EQ(tail.last("loss"), 2.5);
  EXPECT_TRUE(MetricRows(path.parent_path() / "none.jsonl").empty());
}

}  // namespace
}  // namespace titan::cli
