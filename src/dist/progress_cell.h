#pragma once

#include <atomic>
#include <cstdint>

#include "titan/dist/watchdog.h"

namespace titan::dist {

/// What the training thread says that it is at, read by another one. Who reads a phase also sees that it has
/// begun: a new phase's limit never meets the time that the one before it took.
class ProgressCell {
 public:
  struct Reading {
    ProgressKind kind;
    const char* what;
    int64_t step;
    uint64_t count;  ///< of what was told, this or more
  };

  void tell() { count_.fetch_add(1, std::memory_order_release); }
  void tell(ProgressKind kind, const char* what, int64_t step) {
    tell();
    step_.store(step, std::memory_order_release);
    what_.store(what, std::memory_order_release);
    kind_.store(kind, std::memory_order_release);
  }
  Reading read() const {
    Reading reading{};
    reading.kind = kind_.load(std::memory_order_acquire);
    reading.what = what_.load(std::memory_order_acquire);
    reading.step = step_.load(std::memory_order_acquire);
    reading.count = count_.load(std::memory_order_acquire);
    return reading;
  }

 private:
  std::atomic<ProgressKind> kind_{ProgressKind::Idle};
  std::atomic<const char*> what_{"start"};
  std::atomic<int64_t> step_{-1};
  std::atomic<uint64_t> count_{0};
};

}  // namespace titan::dist
