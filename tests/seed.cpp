// Linked into every test program that uses LibTorch: each test starts from the same random numbers, whatever
// ran before it. at::manual_seed inside a test still overrides it.

#include <ATen/Context.h>
#include <gtest/gtest.h>

namespace {

class SeedEachTest : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& /*test*/) override { at::manual_seed(1); }
};

// gtest owns the listener.
const bool listens = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new SeedEachTest);
  return true;
}();

}  // namespace
