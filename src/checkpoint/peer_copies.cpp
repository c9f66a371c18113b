#include "peer_copies.h"

#include <atomic>
#include <exception>

#include "titan/core/error.h"
#include "within.h"

namespace titan::checkpoint::detail {

// Shared with the thread that copies, which may outlive the rest.
struct PeerCopies::Round {
  explicit Round(int64_t number) : step(number) {}

  void end(const std::string& lost) {
    const std::lock_guard lock(mutex);
    ended = true;
    connection_lost = lost;
  }

  const int64_t step;
  std::shared_ptr<std::atomic<bool>> given_up = std::make_shared<std::atomic<bool>>(false);
  std::string problem;  // of files; written before it has ended
  std::mutex mutex;     // of what follows
  bool ended = false;
  std::string connection_lost;
};

void PeerCopies::make(int64_t step, const std::vector<FileTransfer>& transfers,
                      std::chrono::milliseconds limit, const std::function<void()>& progress) {
  const auto round = std::make_shared<Round>(step);
  {
    const std::lock_guard lock(mutex_);
    last_ = round;
  }
  const auto copy = [group = group_, transfers, progress, round] {
    try {
      round->problem = transfer_files(*group, transfers, {progress, round->given_up});
    } catch (const std::exception& error) {
      round->end(error.what());
      throw;
    }
    round->end("");
  };
  if (!within(limit, copy)) {
    *round->given_up = true;
    throw Error(
        titan::str("the copies weren't made within ", static_cast<double>(limit.count()) / 1000, " s"));
  }
  if (!round->problem.empty()) throw Error(round->problem);
}

std::string PeerCopies::why_not() const {
  std::shared_ptr<Round> round;
  {
    const std::lock_guard lock(mutex_);
    round = last_;
  }
  if (!round) return "";
  const std::lock_guard lock(round->mutex);
  if (!round->ended) return titan::str("the copies of step ", round->step, " are still on their way");
  if (round->connection_lost.empty()) return "";
  return titan::str("copies can't be made since those of step ", round->step, ": ", round->connection_lost);
}

}  // namespace titan::checkpoint::detail
