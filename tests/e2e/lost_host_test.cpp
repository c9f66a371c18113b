// A host is taken away: it loses its power, or only its network. The ranks that are left end, and say so.

#include <chrono>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "e2e/hosts.h"
#include "e2e/live_run.h"

namespace titan::testing {
namespace {

// run_ranks RANK...: runs them and leaves their exit codes. `lose_power` stops them all and cuts the link, so
// that nothing answers any more and no connection is closed; `lose_network` only cuts the link.
// Ranks that this test leaves behind, because it was killed itself, end after some minutes.
constexpr const char* kRunRanks = R"(
ulimit -t 200
run_ranks() {
  for rank in $*; do
    (RANK=$rank $PROGRAM > $FOLDER/out.$rank 2> $FOLDER/err.$rank & echo $! > $FOLDER/pid.$rank
     wait $!; echo $? > $FOLDER/status.$rank) &
  done
}
lose_power() {
  for rank in $*; do kill -STOP $(cat $FOLDER/pid.$rank) || exit 1; done
  lose_network
}
lose_network() { ip link set $END down && touch $FOLDER/is_lost || exit 1; }
)";
constexpr const char* kLoss = "await loss 100000\n";
constexpr const char* kStay = "sleep 1000\n";

/// Two ranks on the first host and three on the second, of which rank 3 has no neighbor on the first.
class LostHost : public ::testing::Test {
 protected:
  void start(const std::string& loss_of_first, const std::string& loss_of_second,
             const std::string& shared_name = "") {
    std::string program;
    for (const std::string& word :
         train_words({source_file("docs/examples/custom_model/ngram.toml"), "--experimental.custom_import",
                      std::string(TITAN_BINARY_DIR) + "/lib/libngram.so", "--training.steps", "1000000",
                      "--training.seq_len", "16", "--metrics.log_freq", "1000", "--log-rank", "all",
                      "--job.dump_folder", run_.string()}))
      program += word + " ";
    const auto script = [](const std::string& ranks, const std::string& loss) {
      return str(kRunRanks, "run_ranks ", ranks, "\n", loss.empty() ? "" : str(kLoss, loss, " ", ranks, "\n"),
                 kStay);
    };
    hosts_.emplace(start_two_hosts(folder_, script("0 1", loss_of_first), script("2 3 4", loss_of_second),
                                   {{"NETWORK", "10.0.78."},
                                    {"MASK", "/24"},
                                    {"SHARED_NAME", shared_name},
                                    {"PROGRAM", program},
                                    {"OMP_NUM_THREADS", "1"},
                                    {"WORLD_SIZE", "5"},
                                    {"MASTER_ADDR", "first"},
                                    {"MASTER_PORT", "29500"}}));
    if (!wait_until([&] { return last_logged_step(run_) > 0 || !is_running(hosts_->pid()); }, 120) ||
        !is_running(hosts_->pid())) {
      const CommandResult result = hosts_->wait(1);
      if (cannot_run_here(result)) GTEST_SKIP() << "no namespaces here, or no links between them";
      FAIL() << result.err << text_of(folder_ / "err.0") << text_of(folder_ / "err.2");
    }
    std::this_thread::sleep_for(std::chrono::seconds(3));  // past the first heartbeats
  }

  void lose() {
    std::ofstream(folder_ / "loss").close();
    ASSERT_TRUE(wait_until([&] { return fs::exists(folder_ / "is_lost"); }));
    lost_ = std::chrono::steady_clock::now();
  }

  void expect_end(int rank, const std::string& line) {
    const MachineLag lag;
    const std::string name = std::to_string(rank);
    EXPECT_TRUE(wait_until([&] { return !text_of(folder_ / ("status." + name)).empty(); }, 60)) << rank;
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - lost_;
    EXPECT_LT(elapsed.count(), 10 + lag.seconds()) << rank;
    EXPECT_THAT(text_of(folder_ / ("err." + name)), ContainsRegex(line)) << rank;
    std::printf("rank %d ended after %.1f s with %s", rank, elapsed.count(),
                text_of(folder_ / ("status." + name)).c_str());
  }

  void expect_ends_on_first(const std::string& lost = "second") {
    for (const int rank : {0, 1})
      expect_end(
          rank, str("the job (hangs|fails): host ", lost, " is gone [^\n]*, and with it ranks 2, 3, 4 of 5"));
  }
  void expect_ends_on_second() {
    for (const int rank : {2, 3, 4})
      expect_end(rank, "the job (hangs|fails): host first is gone [^\n]*, and with it rank [01] of 5");
  }

  const fs::path folder_ = fresh_folder("hosts"), run_ = fresh_folder("run");
  std::optional<Command> hosts_;
  std::chrono::steady_clock::time_point lost_;
};

// The first host has rank 0 and with it the job's store.
TEST_F(LostHost, TheSecondLosesItsPower) {
  start("", "lose_power");
  if (IsSkipped() || HasFatalFailure()) return;
  lose();
  expect_ends_on_first();
}

// As containers may.
TEST_F(LostHost, BothHaveTheSameName) {
  start("", "lose_power", "node");
  if (IsSkipped() || HasFatalFailure()) return;
  lose();
  expect_ends_on_first("node");
}

TEST_F(LostHost, TheFirstLosesItsPower) {
  start("lose_power", "");
  if (IsSkipped() || HasFatalFailure()) return;
  lose();
  expect_ends_on_second();
}

TEST_F(LostHost, EachHasLostTheOther) {
  start("", "lose_network");
  if (IsSkipped() || HasFatalFailure()) return;
  lose();
  expect_ends_on_first();
  expect_ends_on_second();
}

}  // namespace
}  // namespace titan::testing
