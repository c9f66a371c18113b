#include "arrivals.h"

#include <exception>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "titan/core/error.h"
#include "within.h"

namespace titan::checkpoint::detail {
namespace {

// A store whose process is stopped never answers.
constexpr std::chrono::seconds kLongestAnswer(2);

int64_t call_of(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return -1;
  return std::stoll(store.get_to_str(key));
}

}  // namespace

Arrivals::Arrivals(const dist::World& world, std::string name) : world_(world), name_(std::move(name)) {}

std::string Arrivals::key_of(int rank) const { return titan::str("checkpoint/", name_, "/", rank); }

void Arrivals::tell(int64_t call) const {
  const auto set = [arrivals = *this, call] {
    arrivals.world_.store().set(arrivals.key_of(arrivals.world_.rank()), std::to_string(call));
  };
  try {
    within(kLongestAnswer, set);
  } catch (const std::exception&) {
    // Only messages get worse by it.
  }
}

std::vector<int> Arrivals::missing(int first, int last, int64_t call) const {
  auto found = std::make_shared<std::vector<int>>();
  const auto look = [found, arrivals = *this, first, last, call] {
    for (int rank = first; rank < last; ++rank)
      if (call_of(arrivals.world_.store(), arrivals.key_of(rank)) < call) found->push_back(rank);
  };
  try {
    if (!within(kLongestAnswer, look)) return {};
  } catch (const std::exception&) {
    return {};
  }
  return *found;
}

}  // namespace titan::checkpoint::detail
