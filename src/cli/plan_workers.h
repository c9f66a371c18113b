#pragma once

// Processes that plan jobs, because a process has one planned GPU.

#include <sys/types.h>
#include <functional>
#include <string>
#include <vector>

#include "job/plan_search.h"

namespace titan::cli {

/// Started before this process makes its first tensor; they end with it.
class PlanWorkers {
 public:
  using Answer = std::function<train::PlanAnswer(const train::PlanRequest&)>;

  /// `open` is called once in each of `count` children, and returns what answers a request there. Throws Error if one can't be started.
  PlanWorkers(int count, const std::function<Answer()>& open);
  ~PlanWorkers();
  PlanWorkers(const PlanWorkers&) = delete;
  PlanWorkers& operator=(const PlanWorkers&) = delete;

  /// A train::Planner. A worker that ends answers its request with an error, and the others continue.
  void plan(const train::NextRequest& next, const train::TakeAnswer& take);

 private:
  PlanWorkers();

  struct Worker {
    pid_t process = 0;
    int requests = -1, answers = -1;  // pipes
  };
  std::vector<Worker> workers_;
  void (*previous_)(int) = nullptr;  // the action for SIGPIPE
};

}  // namespace titan::cli
