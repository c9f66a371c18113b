#pragma once

#include <functional>
#include <memory>
#include <thread>

namespace titan::checkpoint::detail {

/// A thread that does one job at a time.
class Background {
 public:
  Background();
  /// A job that is still under way is left to itself.
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  /// Only when there is no other. `job` owns what it uses, and doesn't throw.
  void start(std::function<void()> job);
  bool busy() const;
  /// Returns true when there is no job; false when `give_up` says so, which is asked now and then.
  bool wait(const std::function<bool()>& give_up) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace titan::checkpoint::detail
