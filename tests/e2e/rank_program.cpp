// The rank program of the launch tests: joins the others, sums the ranks, prints its identity, then does what
// its arguments say.
//   rank_program [timeout_s] [throw RANK | exit RANK CODE | hang]

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "titan/core/error.h"
#include "titan/dist/collectives.h"
#include "titan/dist/world.h"

namespace {

void act(const titan::dist::World& world, const std::vector<std::string>& words) {
  if (words.empty()) return;
  if (words[0] == "hang") {
    // All wait for a call that never comes: the others notice one that dies.
    if (world.rank() == 0) world.everyone()->barrier({"rank_program::hang"}).wait();
    while (true) pause();
  }
  const bool chosen = world.rank() == std::stoi(words.at(1));
  TITAN_CHECK(!(chosen && words[0] == "throw"), "rank ", world.rank(), " was told to throw");
  if (chosen && words[0] == "exit") _exit(std::stoi(words.at(2)));
  world.everyone()->barrier({"rank_program::peers"}).wait();
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  const int timeout_s = words.empty() ? 30 : std::stoi(words[0]);
  if (!words.empty()) words.erase(words.begin());
  try {
    const auto world = titan::dist::init({.device = "cpu", .timeout = std::chrono::seconds(timeout_s)});
    const auto sum = world.everyone()->sum(int64_t{world.rank()}, {"rank_program::sum"});
    std::printf("rank %d of %d, local %d of %d, by %s, sum %ld, pid %d\n", world.rank(), world.size(),
                world.local_rank(), world.local_size(), world.launched_by().c_str(), static_cast<long>(sum),
                getpid());
    std::fflush(stdout);
    act(world, words);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::fflush(nullptr);
    _exit(3);
  }
  return 0;
}
