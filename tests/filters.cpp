// Linked into every test program: --gtest_filter that chooses no test is a failure, because a test that was renamed would no longer run.

#include <gtest/gtest.h>

namespace {

class FailWithoutTests : public testing::EmptyTestEventListener {
  void OnTestProgramStart(const testing::UnitTest& program) override {
    if (program.test_to_run_count() == 0) ADD_FAILURE() << "--gtest_filter chooses no test";
  }
};

// gtest owns the listener.
[[maybe_unused]] const bool listens = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new FailWithoutTests);
  return true;
}();

}  // namespace
