#pragma once

// Records the collectives and operations that a piece of code calls.

#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/record_function.h>

#include "dist/flight_record.h"
#include "distributed/world.h"

namespace titan::testing {

/// The collectives of `run` with this phase.
template <class Run>
std::vector<dist::CallRecord> calls_of(const char* phase, const Run& run) {
  const uint64_t before = world().recorder().num_calls();
  run();
  std::vector<dist::CallRecord> calls;
  for (const dist::CallRecord& call : world().recorder().snapshot())
    if (call.number >= before && std::strcmp(call.phase, phase) == 0) calls.push_back(call);
  return calls;
}

/// Reports each operation of the dispatcher, on any thread, during its lifetime. Only one may exist at a
/// time.
class OperationWatch {
 public:
  using Watch = std::function<void(const std::string& name, const std::vector<c10::IValue>& outputs)>;
  explicit OperationWatch(Watch watch) {
    set(std::move(watch));
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(nullptr, &OperationWatch::note)
                                        .needsOutputs(true)
                                        .scopes({at::RecordScope::FUNCTION}));
  }
  ~OperationWatch() {
    at::removeCallback(handle_);
    set(nullptr);
  }
  OperationWatch(const OperationWatch&) = delete;
  OperationWatch& operator=(const OperationWatch&) = delete;

 private:
  static void note(const at::RecordFunction& call, at::ObserverContext* /*context*/) {
    const std::lock_guard lock(mutex_);
    if (watch_) watch_(call.name(), call.outputs());
  }
  static void set(Watch watch) {
    const std::lock_guard lock(mutex_);
    watch_ = std::move(watch);
  }
  inline static std::mutex mutex_;
  inline static Watch watch_;
  at::CallbackHandle handle_ = 0;
};

}  // namespace titan::testing
