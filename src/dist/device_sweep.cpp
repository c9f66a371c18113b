#include "device_sweep.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <thread>

namespace titan::dist {

struct DeviceSweep::State {
  std::shared_ptr<FlightRecorder> recorder;
  std::chrono::milliseconds period;
  std::mutex mutex;
  std::condition_variable changed;
  bool stops = false, ended = false;

  void run() {
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, period, [this] { return stops; })) {
      lock.unlock();
      recorder->sweep();
      lock.lock();
    }
    ended = true;
    changed.notify_all();
  }
};

DeviceSweep::DeviceSweep(std::shared_ptr<FlightRecorder> recorder, std::chrono::milliseconds period)
    : state_(std::make_shared<State>()) {
  state_->recorder = std::move(recorder);
  state_->period = period;
  std::thread([state = state_] {
    pthread_setname_np(pthread_self(), "titan-sweep");
    state->run();
  }).detach();
}

DeviceSweep::~DeviceSweep() {
  std::unique_lock lock(state_->mutex);
  state_->stops = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, std::chrono::seconds(1), [this] { return state_->ended; });
}

}  // namespace titan::dist
