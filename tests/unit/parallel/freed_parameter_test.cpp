// What a process says when it reads a parameter that fully_shard has freed.

#include <csignal>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "titan/core/crash.h"
#include "titan/dist/device_mesh.h"
#include "titan/dist/world.h"
#include "titan/nn/linear.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/parameters.h"

namespace titan {
namespace {

// As a loop of a user's own, without the program's main().
nn::Linear used_layer() {
  const dist::World world = dist::init({.backend = "fake", .fake_rank = 0, .fake_world_size = 2});
  nn::Linear layer(8, 8);
  fully_shard(layer, {.mesh = DeviceMesh::create(world, {{"dp_shard", 2}})});
  materialize(layer, 1);
  layer(at::ones({2, 8})).sum().backward();
  return layer;
}

TEST(FreedParameterDeathTest, IsNamedByTheCrashHandlerOfDistInit) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(used_layer()->weight.detach().clone(), ::testing::KilledBySignal(SIGSEGV),
              "fatal signal SIGSEGV [^\n]*\n.titan. likely a sharded parameter used outside its module: ");
}

TEST(FreedParameterDeathTest, IsLeftToOthersWhoDeclineTheHandler) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        decline_crash_handler();
        used_layer()->weight.detach().clone();
      },
      ::testing::KilledBySignal(SIGSEGV), "^$");
}

}  // namespace
}  // namespace titan
