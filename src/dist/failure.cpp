#include "titan/dist/failure.h"

#include <exception>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "titan/core/error.h"

namespace titan::dist {

std::string tell_failure(const World& world, const std::string& message) {
  const std::string mine = str("rank ", world.rank(), ": ", message);
  if (world.size() == 1) return "";
  try {
    const std::vector<uint8_t> told =
        world.store().compareSet("titan/first_failure", std::vector<uint8_t>{}, {mine.begin(), mine.end()});
    const std::string first(told.begin(), told.end());
    return first == mine ? "" : first;
  } catch (const std::exception&) {
    return "";  // the store was rank 0's, and that is the one that is lost
  }
}

}  // namespace titan::dist
