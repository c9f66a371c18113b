// Linked into every test program that uses LibTorch: each test starts from the same random numbers, whatever
// ran before it. at::manual_seed inside a test still overrides it. The CUDA plugin is opened first, where a GPU is visible,
// because LibTorch looks for CUDA when it is seeded, and only once. Ranks of distributed tests choose their device themselves.

#include <cstdlib>

#include <ATen/Context.h>
#include <gtest/gtest.h>

#include "dist/device_backend.h"

namespace {

class SeedEachTest : public testing::EmptyTestEventListener {
  void OnTestProgramStart(const testing::UnitTest& /*program*/) override {
    if (!std::getenv("RANK")) titan::dist::open_cuda_plugin();
  }
  void OnTestStart(const testing::TestInfo& /*test*/) override { at::manual_seed(1); }
};

// gtest owns the listener.
const bool listens = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new SeedEachTest);
  return true;
}();

}  // namespace
