// Linked into every test program: a filter, and each pattern in it, must choose a test, because a test that was renamed would no longer run.

#include "filters.h"

#include <fnmatch.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

namespace {

std::string full_name(const ::testing::TestInfo& test) {
  return std::string(test.test_suite_name()) + "." + test.name();
}

bool chooses_a_test(const std::string& pattern, const ::testing::UnitTest& program) {
  for (int i = 0; i < program.total_test_suite_count(); ++i) {
    const ::testing::TestSuite& suite = *program.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const ::testing::TestInfo& test = *suite.GetTestInfo(j);
      if ((test.should_run() || test.is_in_another_shard()) &&
          fnmatch(pattern.c_str(), full_name(test).c_str(), 0) == 0)
        return true;
    }
  }
  return false;
}

class FailWithoutTests : public ::testing::EmptyTestEventListener {
  void OnTestProgramStart(const ::testing::UnitTest& program) override {
    if (program.test_to_run_count() == 0) ADD_FAILURE() << "--gtest_filter chooses no test";
    const std::string filter = GTEST_FLAG_GET(filter);
    std::istringstream patterns(filter.substr(0, filter.find('-')));
    for (std::string pattern; std::getline(patterns, pattern, ':');)
      if (!pattern.empty() && !chooses_a_test(pattern, program))
        ADD_FAILURE() << "'" << pattern << "' of --gtest_filter chooses no test";
  }
};

// gtest owns the listener.
[[maybe_unused]] const bool listens = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new FailWithoutTests);
  return true;
}();

}  // namespace

namespace titan::testing {

void choose_file(const std::string& word) {
  if (!word.starts_with("--file=")) return;
  const std::string name = word.substr(7);
  std::string others;
  size_t num_chosen = 0;
  const auto& tests = *::testing::UnitTest::GetInstance();
  for (int i = 0; i < tests.total_test_suite_count(); ++i) {
    const ::testing::TestSuite& suite = *tests.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const ::testing::TestInfo& test = *suite.GetTestInfo(j);
      if (std::filesystem::path(test.file()).stem() == name)
        ++num_chosen;
      else
        others += ":" + full_name(test);
    }
  }
  if (num_chosen == 0) {
    std::fprintf(stderr, "%s: no test is defined in %s.cpp\n", word.c_str(), name.c_str());
    std::exit(1);
  }
  const std::string filter = GTEST_FLAG_GET(filter);
  GTEST_FLAG_SET(filter, filter + (filter.find('-') == std::string::npos ? "-" : "") + others);
}

}  // namespace titan::testing
