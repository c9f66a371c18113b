#include "titan/dist/failure.h"

#include <chrono>
#include <exception>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "titan/core/error.h"

namespace titan::dist {

namespace {

constexpr const char* kFirst = "titan/first_failure";
constexpr const char* kTold = "titan/failures_told";

// A failure needs no longer to go through a pipeline, from neighbour to neighbour.
constexpr auto kGrace = std::chrono::seconds(2);

// Rank 0's process keeps the store, and is to end: not before the others have told. The one that is lost
// never will.
void wait_until_told(c10d::Store& store, int num_ranks) {
  const auto end = std::chrono::steady_clock::now() + kGrace;
  while (store.add(kTold, 0) + 1 < num_ranks && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

}  // namespace

std::string tell_failure(const World& world, const std::string& message,
                         const std::function<void()>& let_go) {
  const std::string mine = str("rank ", world.rank(), ": ", message);
  if (world.size() == 1) return "";
  bool is_told = false;
  try {
    c10d::Store& store = world.store();
    const std::vector<uint8_t> told =
        store.compareSet(kFirst, std::vector<uint8_t>{}, {mine.begin(), mine.end()});
    const std::string first(told.begin(), told.end());
    store.add(kTold, 1);
    is_told = true;
    let_go();
    if (world.rank() == 0 && world.backend() != "fake") wait_until_told(store, world.size());
    return first == mine ? "" : first;
  } catch (const std::exception&) {
    if (!is_told) let_go();
    return "probably rank 0 of the job: the store that it, or its launcher, keeps is gone";
  }
}

}  // namespace titan::dist
