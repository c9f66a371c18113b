// titan top on a terminal: what it shows while a run continues, and what it leaves there at the end.

#include <csignal>
#include <sstream>

#include "e2e/live_run.h"
#include "e2e/small_run.h"
#include "e2e/terminal.h"

namespace titan::testing {
namespace {

/// The text on the terminal, or "" while it is being painted.
std::string picture_of(TerminalCommand& top) {
  const Screen& screen = top.screen();
  return screen.is_whole() ? screen.text() : "";
}

int64_t step_of(const std::string& picture) { return number_after(picture, "\nstep "); }
int64_t checkpoint_of(const std::string& picture) {
  return number_after(picture, "\nlast checkpoint: step ");
}

// Nothing of earlier pictures remains: one line of each kind, and one per rank.
void expect_one_picture(const std::string& picture) {
  std::istringstream lines(picture);
  std::string kinds;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string first;
    words >> first;
    if (first == "rank" && line.find("holds the others up") != std::string::npos) continue;
    kinds += first.starts_with("/") ? "RUN " : first + " ";
  }
  EXPECT_EQ(kinds, "RUN step loss last  rank 0 1 ") << picture;
}

TEST(Top, RepaintsATerminalUntilTheRunEnds) {
  const fs::path folder = fresh_folder("run"), run = folder / "out";
  Command training(
      train_words(Words{"--nproc", "2"} + small_run(folder) +
                  Words{"--training.steps=100000", "--validation.no_enable", "--checkpoint.enable",
                        "--checkpoint.interval=10", "--job.dump_folder", run.string()}),
      {{"OMP_NUM_THREADS", "1"}});
  ASSERT_TRUE(wait_until([&] { return fs::exists(run / "checkpoint" / "step-10"); }));
  const Words words = {titan_program(), "top", run.string(), "--interval", "0.1"};
  TerminalCommand wide(words, 30, 120);
  // Longer lines than the terminal, and no more of them than needed.
  TerminalCommand narrow(Words{"env", "NO_COLOR=1"} + words, 12, 40);

  std::string first, later, cut;
  ASSERT_TRUE(wait_until([&] {
    first = picture_of(wide);
    return first.find("running") != std::string::npos && first.find(", complete\n") != std::string::npos;
  })) << first;
  EXPECT_THAT(
      first,
      AllOf(HasSubstr("running"), ContainsRegex(" of 100000  \\[[#-]+\\] [0-9]+ %  .* per step  .* left\n"),
            ContainsRegex("\nlast checkpoint: step [0-9]+, 20[0-9-]+ [0-9:]+, [0-9.]+ [kM]B, complete\n"),
            ContainsRegex("\nrank +host +step +at +own ms +waits ms +memory GiB +event")));
  for (const char* rank : {"0", "1"})
    EXPECT_THAT(first, ContainsRegex(std::string("\n +") + rank +
                                     " +[^ ]+ +[0-9]+ .* [0-9]+\\.[0-9]+ \\([0-9.]+ %\\) "));
  expect_one_picture(first);
  ASSERT_TRUE(wait_until([&] {
    later = picture_of(wide);
    return step_of(later) > step_of(first) + 10 && checkpoint_of(later) > checkpoint_of(first);
  })) << later;
  expect_one_picture(later);
  EXPECT_THAT(wide.bytes(), HasSubstr("\033[32m"));

  ASSERT_TRUE(wait_until([&] { return step_of(cut = picture_of(narrow)) > step_of(first); })) << cut;
  expect_one_picture(cut);
  EXPECT_EQ(cut.substr(0, cut.find('\n')), run.string().substr(0, 40));
  EXPECT_EQ(narrow.screen().num_scrolled(), 0u) << cut;
  EXPECT_THAT(narrow.bytes(), Not(ContainsRegex("\033\\[[0-9]+m")));
  narrow.type("\x03");
  ASSERT_TRUE(wait_until([&] { return narrow.has_ended(); }));
  EXPECT_EQ(narrow.status(), 128 + SIGINT);

  training.signal(SIGTERM);
  ASSERT_EQ(training.wait().status, 0);
  ASSERT_TRUE(wait_until([&] { return wide.has_ended(); }));
  EXPECT_EQ(wide.status(), 0);
  const std::string last = wide.screen().text();
  EXPECT_THAT(last, HasSubstr("stopped by SIGTERM"));
  EXPECT_EQ(step_of(last), last_logged_step(run)) << last;
  expect_one_picture(last);
  EXPECT_EQ(wide.screen().column(), 0u) << "the shell's next line follows the last one";

  for (TerminalCommand* top : {&wide, &narrow}) {  // as the shell will find them
    EXPECT_TRUE(top->is_as_before());
    EXPECT_TRUE(top->screen().is_plain());
  }
}

}  // namespace
}  // namespace titan::testing
