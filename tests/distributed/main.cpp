// The main function of every distributed test: one process per rank, started by `titan launch`. Rank 0 prints
// gtest's output; the others print only failures. With --file=NAME, only the cases of NAME.cpp run.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "distributed/world.h"
#include "filters.h"

namespace {

std::optional<titan::dist::World> this_world;
bool run_all_cases = false;

/// Prints failures only, with the rank in front.
class FailurePrinter : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& test) override {
    test_ = std::string(test.test_suite_name()) + "." + test.name();
  }
  // gtest holds its lock here: asking it for the running test would deadlock.
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "%s failed on rank %d\n%s:%d\n%s\n", test_.c_str(), this_world->rank(),
                 result.file_name() ? result.file_name() : "", result.line_number(), result.summary());
  }

  std::string test_;
};

/// A rank whose test failed may have skipped calls that its peers wait for: it ends at once, and the launcher
/// ends them.
class EndAtFailure : public testing::EmptyTestEventListener {
  void OnTestEnd(const testing::TestInfo& test) override {
    if (!test.result()->Failed()) return;
    std::fflush(nullptr);
    _exit(1);
  }
};

void choose_output(int rank) {
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  auto* printer = listeners.Release(listeners.default_result_printer());
  if (rank != 0) {
    delete printer;
    printer = new FailurePrinter;
  }
  listeners.Append(new EndAtFailure);
  listeners.Append(printer);  // after the line above: gtest calls its listeners in reverse when a test ends
}

titan::dist::InitOptions options_from(const std::vector<std::string>& words) {
  titan::dist::InitOptions options{.backend = "gloo", .device = "cpu", .timeout = std::chrono::seconds(60)};
  for (const std::string& word : words) {
    if (word == "--sockets") options.direct_memory = false;  // as if the ranks were on several hosts
    if (word == "--cuda") options.device = "cuda";           // all ranks share the GPUs there are, hence gloo
    if (word == "--nccl") {                                  // a GPU for each rank; virtual ones can be slow
      options.backend = "nccl", options.device = "cuda";
      options.timeout = std::chrono::minutes(4);
    }
    if (word == "--check-collectives") options.check_collectives = true;
    titan::testing::choose_file(word);
    if (word == "--all") run_all_cases = true;  // not only a selection that covers the rest
  }
  return options;
}

}  // namespace

namespace titan::testing {
const dist::World& world() { return *this_world; }
bool all_cases() { return run_all_cases; }
}  // namespace titan::testing

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  try {
    this_world = titan::dist::init(options_from({argv + 1, argv + argc}));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  choose_output(this_world->rank());
  const int failures = RUN_ALL_TESTS();
  this_world.reset();
  return failures;
}
