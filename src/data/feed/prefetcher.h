#pragma once

// Makes the coming steps of one rank in threads.
//
// A ring of slots, each a step's rows. Worker w of W fills rows w, w + W, ... of one step after another, and
// waits when it is `num_ahead` steps ahead of what was taken. A lane belongs to one worker, so its order of
// samples doesn't depend on timing.

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/data/feed.h"

namespace titan::data {

struct PrefetchOptions {
  int64_t num_rows = 1;  ///< of a step; rows beyond the lanes are padding
  int64_t seq_len = 1;
  int64_t num_workers = 1;
  int64_t num_ahead = 2;  ///< steps made before they are asked for
  bool pin_memory = false;
};

/// A step's rows. `valid` and `states` have an entry a lane.
struct PreparedStep {
  at::Tensor input;   ///< int64 [num_rows, seq_len]
  at::Tensor labels;  ///< as input
  std::vector<int64_t> valid;
  std::vector<LaneState> states;  ///< after this step
};

class Prefetcher {
 public:
  /// Starts at once.
  Prefetcher(std::vector<std::unique_ptr<Lane>> lanes, const PrefetchOptions& options);
  ~Prefetcher();

  /// The next step; waits for it. Rethrows what its making threw, and again at every further call.
  PreparedStep take();
  /// Whether take() would return at once, after waiting for that as long.
  bool wait(std::chrono::milliseconds longest);

 private:
  struct Slot {
    PreparedStep step;
    int64_t prepared_for = -1;  // the step whose buffers these are
    int64_t num_done = 0;       // workers that have filled their rows
    std::exception_ptr error;
  };

  // The slot that take() looks at is filled, or failed.
  bool is_ready() const;
  void work(std::stop_token stop, int64_t worker);
  // The slot for `step`, ready to be written; null when stopped.
  Slot* wait_for_slot(int64_t step, std::stop_token stop);
  void prepare(Slot& slot, int64_t step);
  void fill_rows(Slot& slot, int64_t worker);
  void finish(Slot& slot, std::exception_ptr error);

  std::vector<std::unique_ptr<Lane>> lanes_;
  PrefetchOptions options_;
  std::vector<Slot> slots_;
  int64_t num_taken_ = 0;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::vector<std::jthread> workers_;  // last: stopped and joined before anything that they use goes
};

}  // namespace titan::data
