// A run's files, and the commands that read them: the ranks' logs, titan debug events, top and report.

#include <algorithm>
#include <cmath>
#include <csignal>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "e2e/small_run.h"

namespace titan::testing {
namespace {

// By rank, for the newest process.
std::map<int, Lines> structured_logs(const fs::path& run) {
  std::map<int, Lines> logs;
  std::set<fs::path> files;
  for (const auto& entry : fs::directory_iterator(run / "structured_logs")) files.insert(entry.path());
  for (const fs::path& file : files) {
    Lines lines = read_lines(file);
    logs[lines.front().at("rank").get<int>()] = std::move(lines);
  }
  return logs;
}

int64_t count_named(const Lines& lines, const std::string& name) {
  return std::count_if(lines.begin(), lines.end(),
                       [&](const nlohmann::json& line) { return line.at("log_type_name") == name; });
}

CommandResult titan(const Words& words) { return run(Words{titan_program()} + words, {}, 30); }

TEST(Observability, WritesALogPerRankAndOneTraceOfAll) {
  const auto folder = fresh_folder("run");
  train(folder / "out", Words{"--nproc", "2"} + small_run(folder));
  const auto logs = structured_logs(folder / "out");
  ASSERT_EQ(logs.size(), 2u);
  for (const auto& [rank, lines] : logs) {
    EXPECT_EQ(lines.front().at("environment").at("world_size"), 2);
    for (const char* span : {"step", "fetching_batch", "fwd_bwd", "optim", "collect_dist_metrics"}) {
      EXPECT_EQ(count_named(lines, span + std::string("_start")), 4) << span;
      EXPECT_EQ(count_named(lines, span + std::string("_end")), 4) << span;
    }
    EXPECT_EQ(count_named(lines, "eval_end"), 3);
    EXPECT_EQ(count_named(lines, "memory_gib"), 4);
    // The first interval includes set-up. On a GPU a step is logged during the next one, so no step begins after the third interval.
    EXPECT_EQ(count_named(lines, "own_s"), tests_on_gpu() ? 2 : 3);
    EXPECT_EQ(lines.back().at("log_type_name"), "teardown_end");
    for (size_t i = 0; i < lines.size(); ++i) EXPECT_EQ(lines[i].at("seq_id"), i);
  }

  const CommandResult table = titan({"debug", "events", (folder / "out").string()});
  EXPECT_EQ(table.status, 0) << table.err;
  EXPECT_THAT(table.out, HasSubstr("rank 1 ("));
  EXPECT_THAT(table.out, HasSubstr("fwd_bwd"));

  const auto file = folder / "trace.json";
  const CommandResult merged =
      titan({"debug", "events", (folder / "out").string(), "--perfetto", file.string()});
  ASSERT_EQ(merged.status, 0) << merged.err;
  std::map<int, int64_t> steps, counters;
  const auto trace = nlohmann::json::parse(text_of(file));
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X" && event.at("name") == "step") {
      ++steps[event.at("pid").get<int>()];
      EXPECT_GT(event.at("dur"), 0);
    }
    if (event.at("ph") == "C" && event.at("name") == "loss") ++counters[event.at("pid").get<int>()];
  }
  EXPECT_EQ(steps, (std::map<int, int64_t>{{0, 4}, {1, 4}}));
  EXPECT_EQ(counters, (std::map<int, int64_t>{{0, 4}, {1, 4}}));
}

TEST(Observability, LogCanBeOff) {
  const auto folder = fresh_folder("run");
  train(folder / "out", small_run(folder) + Words{"--metrics.structured_logs.no_enable"});
  EXPECT_FALSE(fs::exists(folder / "out" / "structured_logs"));
  const CommandResult top = titan({"top", (folder / "out").string(), "--once"});
  EXPECT_EQ(top.status, 0) << top.err;
  EXPECT_THAT(top.out, HasSubstr("no structured logs"));
  const CommandResult events = titan({"debug", "events", (folder / "out").string()});
  EXPECT_EQ(events.status, 2);
  EXPECT_THAT(events.err, HasSubstr("holds no structured logs"));
}

// Rank 1 has slow data: a step takes equally long on all ranks, but only this rank works that long.
TEST(Observability, NamesASlowRank) {
  const auto folder = fresh_folder("run");
  const CommandResult result = try_train(
      Words{"--nproc", "3"} + small_run(folder) +
          Words{"--experimental.custom_import", std::string(TITAN_BINARY_DIR) + "/lib/libslow_rank.so",
                "--training.dataset=slow", "--training.global_batch_size=6", "--training.local_batch_size=2",
                "--training.steps=16", "--metrics.log_freq=2", "--metrics.stragglers.ratio=1.5",
                "--validation.no_enable", "--job.dump_folder", (folder / "out").string()},
      100);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, ContainsRegex("rank 1 \\([^)]*\\) holds the others up: "));
  const CommandResult top = titan({"top", (folder / "out").string(), "--once"});
  ASSERT_EQ(top.status, 0) << top.err;
  EXPECT_THAT(top.out, HasSubstr("rank 1 holds the others up (step "));
  std::istringstream rows(top.out);
  int64_t slowest = 0;
  for (std::string row; std::getline(rows, row);)
    if (row.ends_with("slowest")) {
      ++slowest;
      EXPECT_EQ(row.substr(0, row.find_first_of("0123456789") + 1).back(), '1') << top.out;
    }
  EXPECT_EQ(slowest, 1) << top.out;
  // The others wait where the ranks' tokens are counted.
  for (const auto& [rank, lines] : structured_logs(folder / "out")) {
    double waited = 0;
    for (const auto& line : lines)
      if (line.at("log_type_name") == "wait_s") waited += line.at("value").get<double>();
    if (rank != 1) {
      EXPECT_GT(waited, 0.05) << rank;
    }
  }
}

TEST(Observability, RecordsAStopByASignal) {
  const auto folder = fresh_folder("run");
  Command training(train_words(small_run(folder) + Words{"--training.steps=100000", "--job.dump_folder",
                                                         (folder / "out").string()}),
                   {{"OMP_NUM_THREADS", "1"}});
  ASSERT_TRUE(wait_until([&] { return whole_rows(folder / "out").size() > 3; }));
  training.signal(SIGTERM);
  ASSERT_EQ(training.wait().status, 0);
  const auto last = whole_rows(folder / "out").back().at("step").get<int64_t>();
  const CommandResult top = titan({"top", (folder / "out").string()});
  EXPECT_THAT(top.out, HasSubstr("stopped by SIGTERM"));
  EXPECT_THAT(top.out, HasSubstr("step " + std::to_string(last) + " of 100000"));  // no step that wasn't made
  ASSERT_EQ(titan({"report", (folder / "out").string()}).status, 0);
  const std::string page = text_of(folder / "out" / "report.html");
  EXPECT_THAT(page, HasSubstr("<td>stopped by SIGTERM</td>"));
  EXPECT_THAT(page, HasSubstr("<td>1 to " + std::to_string(last) + "</td>"));
}

TEST(Observability, TopShowsARunningAndAnEndedRun) {
  const auto folder = fresh_folder("run");
  const Words words =
      small_run(folder) + Words{"--training.steps=100000", "--job.dump_folder", (folder / "out").string()};
  Command training(train_words(words), {{"OMP_NUM_THREADS", "1"}});
  CommandResult top;
  wait_until([&] {
    if (whole_rows(folder / "out").size() <= 3) return false;
    top = titan({"top", (folder / "out").string()});  // not a terminal: prints once
    return top.out.find("left") != std::string::npos && top.out.find("running") != std::string::npos;
  });
  training.signal(SIGKILL);
  training.wait();
  ASSERT_EQ(top.status, 0) << top.err;
  EXPECT_THAT(top.out, HasSubstr("running"));
  EXPECT_THAT(top.out, HasSubstr(" of 100000  ["));
  EXPECT_THAT(top.out, HasSubstr("left"));
  EXPECT_THAT(top.out, HasSubstr("checkpoints are off"));

  train(folder / "short", small_run(folder));
  const CommandResult ended = titan({"top", (folder / "short").string()});
  EXPECT_THAT(ended.out, HasSubstr("completed"));
  EXPECT_THAT(ended.out, HasSubstr("step 4 of 4"));
  EXPECT_THAT(ended.out, HasSubstr("validation loss"));
  // Its rank's step, phase, own time and waits, then its memory.
  EXPECT_THAT(ended.out, ContainsRegex("rank +host +step +at +own ms +waits ms +memory GiB +event"));
  EXPECT_THAT(ended.out, ContainsRegex("\n +0 +[^ ]+ +4 .* 0\\.[0-9]+ \\([0-9.]+ %\\) "));
  EXPECT_EQ(titan({"top", (folder / "none").string()}).status, 2);
}

Words checkpointing(int steps) {
  return {"--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no_last_save_model_only",
          "--training.steps=" + std::to_string(steps), "--lr_scheduler.total_steps=8"};
}

TEST(Observability, TopShowsTheLastCheckpoint) {
  const auto folder = fresh_folder("run");
  train(folder / "out", small_run(folder) + checkpointing(3));
  CommandResult top = titan({"top", (folder / "out").string()});
  EXPECT_THAT(top.out,
              ContainsRegex("\nlast checkpoint: step 3, 20[0-9-]+ [0-9:]+, [0-9.]+ [kM]B, complete"));
  fs::remove_all(folder / "out" / "checkpoint");
  top = titan({"top", (folder / "out").string()});
  EXPECT_THAT(top.out, HasSubstr("\nno checkpoint yet\n"));
}

TEST(Observability, ReportIsOneSelfContainedPage) {
  const auto folder = fresh_folder("run");
  const Words words =
      Words{"--nproc", "2"} + small_run(folder) + Words{"--job.description", "two <b>ranks</b> & a restart"};
  train(folder / "out", words + checkpointing(4));
  train(folder / "out", words + checkpointing(8));
  const CommandResult result = titan({"report", (folder / "out").string()});
  ASSERT_EQ(result.status, 0) << result.err;
  const std::string page = text_of(folder / "out" / "report.html");
  for (const char* id : {"overview", "charts", "time", "ranks", "validation", "checkpoints", "restarts",
                         "configuration", "environment"})
    EXPECT_THAT(page, HasSubstr(std::string("<section id=\"") + id + "\">"));
  for (const char* chart :
       {"Loss", "Gradient norm", "Throughput", "Memory", "Learning rate", "Where a step's time goes"})
    EXPECT_THAT(page, HasSubstr(std::string("aria-label=\"") + chart + "\""));
  EXPECT_THAT(page, HasSubstr("two &lt;b&gt;ranks&lt;/b&gt; &amp; a restart"));
  EXPECT_THAT(page, HasSubstr(">completed<"));
  EXPECT_THAT(page, HasSubstr("<td>1 to 4</td>"));  // both starts
  EXPECT_THAT(page, HasSubstr("<td>5 to 8</td>"));
  EXPECT_THAT(page, HasSubstr("<line class=\"restart\""));
  // The page loads nothing from elsewhere.
  for (const char* reference : {"http:", "https:", " src=", "<link", "@import", "url("})
    EXPECT_THAT(page, Not(HasSubstr(reference)));
  // The elements of the parts and of the page are closed.
  for (const char* tag : {"section", "figure", "table", "svg", "script", "div", "main", "body", "html"}) {
    const auto count = [&](const std::string& text) {
      int64_t found = 0;
      for (size_t at = page.find(text); at != std::string::npos; at = page.find(text, at + 1)) ++found;
      return found;
    };
    EXPECT_EQ(count(std::string("<") + tag + ">") + count(std::string("<") + tag + " "),
              count(std::string("</") + tag + ">"))
        << tag;
  }
  EXPECT_EQ(titan({"report", (folder / "none").string()}).status, 2);
}

}  // namespace
}  // namespace titan::testing
