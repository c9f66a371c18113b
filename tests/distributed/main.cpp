#include <optional>

#include <gtest/gtest.h>

#include "distributed/world.h"

namespace {
std::optional<titan::dist::World> this_world;
}  // namespace

namespace titan::testing {
const dist::World& world() { return *this_world; }
}  // namespace titan::testing

// A rank that fails or throws leaves its peers waiting: the short time limit and the launcher end them.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  this_world = titan::dist::init({.timeout = std::chrono::seconds(60)});
  int failures = RUN_ALL_TESTS();
  this_world.reset();
  return failures;
}
