#include "dump_thread.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/heartbeat.h"

namespace titan::dist {

namespace {

constexpr auto kLookForRequests = std::chrono::milliseconds(500);

struct WantedDump {
  std::string reason;
  FlightExtent extent;
};

}  // namespace

struct DumpThread::State {
  std::shared_ptr<FlightDump> dump;
  bool finds_requests = false;

  std::mutex mutex;
  std::condition_variable changed;
  std::optional<WantedDump> wanted;
  bool writes = false, request_found = false, stops = false, ended = false;

  void run() {
    std::unique_lock lock(mutex);
    while (!stops) {
      changed.wait_for(lock, kLookForRequests, [this] { return stops || wanted; });
      write_wanted(lock);
      if (finds_requests && !stops) find_request(lock);
    }
    ended = true;
    changed.notify_all();
  }

  void write_wanted(std::unique_lock<std::mutex>& lock) {
    while (wanted) {
      const WantedDump now = *std::exchange(wanted, std::nullopt);
      writes = true;
      lock.unlock();
      if (const int error = dump->write(now.reason.c_str(), now.extent))
        log::warning(str("can't write the flight record ", dump->path().string(), ": errno ", error));
      lock.lock();
      writes = false;
      changed.notify_all();
    }
  }

  // Of a folder that can't be read nothing is asked; it may be back later.
  void find_request(std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    std::error_code none;
    const bool found = std::filesystem::remove(dump->folder() / kFlightRequest, none);
    lock.lock();
    request_found = request_found || (found && !none);
  }
};

DumpThread::DumpThread(std::shared_ptr<FlightDump> dump, bool finds_requests)
    : state_(std::make_shared<State>()) {
  state_->dump = std::move(dump);
  state_->finds_requests = finds_requests;
  std::thread([state = state_] {
    pthread_setname_np(pthread_self(), "titan-dumps");
    state->run();
  }).detach();
}

DumpThread::~DumpThread() {
  std::unique_lock lock(state_->mutex);
  state_->stops = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, std::chrono::seconds(1), [this] { return state_->ended; });
}

void DumpThread::write(const std::string& reason, FlightExtent extent) {
  const std::lock_guard lock(state_->mutex);
  state_->wanted = {reason, extent};
  state_->changed.notify_all();
}

bool DumpThread::wait(std::chrono::milliseconds limit) {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, limit, [this] { return !state_->wanted && !state_->writes; });
}

bool DumpThread::take_request() {
  const std::lock_guard lock(state_->mutex);
  return std::exchange(state_->request_found, false);
}

}  // namespace titan::dist
