#include "guard/progress.h"

#include <time.h>

#include <fstream>
#include <string>
#include <utility>

#include "dist/flight_record.h"

namespace titan::dist {
namespace {

// A rank whose processors worked for this share of the time computes.
constexpr double kBusy = 0.2;
// So does an endless loop: after this many limits without any other sign, computing stops to count as one.
constexpr int kBusyLimits = 10;

double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// What the kernel has fetched from storage for this process, or is to bring there; not what a cache had.
int64_t storage_mib() {
  std::ifstream file("/proc/self/io");
  std::string name;
  int64_t value = 0, bytes = 0;
  while (file >> name >> value)
    if (name == "read_bytes:" || name == "write_bytes:") bytes += value;
  return bytes >> 20;
}

bool reads_or_writes(ProgressKind kind) {
  return kind == ProgressKind::Data || kind == ProgressKind::Checkpoint;
}

// Peers' collectives wait for somewhat longer than the longest limit, and the watchdog is to come before
// them.
std::chrono::milliseconds longest_computing(const WatchdogLimits& limits, ProgressKind kind) {
  const auto limit = limits.of(kind).time;
  const auto longest =
      std::max({limits.data.time, limits.compute.time, limits.checkpoint.time, limits.validation.time});
  return std::max(limit, std::min(kBusyLimits * limit, longest));
}

}  // namespace

std::string process_field(const std::string& pid, const char* field) {
  std::ifstream file("/proc/" + pid + "/status");
  std::string name, value;
  while (file >> name) {
    std::getline(file >> std::ws, value);
    if (name == field) return value;
  }
  return "";
}

void OwnProgress::look(Milliseconds64 longest_gap) {
  const auto now = StallClock::Clock::now();
  const bool sign = gave_sign(), busy = is_busy(now);
  with_computing_.look(now, sign || busy, longest_gap);
  without_computing_.look(now, sign, longest_gap);
}

bool OwnProgress::gave_sign() {
  reading_ = cell_.read();
  const Signs signs{reading_.count, recorder_.num_calls(), recorder_.waited_ns(),
                    reads_or_writes(reading_.kind) ? storage_mib() : 0};
  return std::exchange(last_signs_, signs) != signs;
}

// The host of a GPU spins while it waits for the device, but not while it reads data or files.
bool OwnProgress::is_busy(StallClock::Clock::time_point now) {
  const double processor_s = processor_seconds();
  const double elapsed_s = std::chrono::duration<double>(now - last_look_).count();
  const double worked_s = processor_s - std::exchange(last_processor_s_, processor_s);
  last_look_ = now;
  const bool counts = computing_is_progress_ || reads_or_writes(reading_.kind);
  return counts && worked_s > kBusy * elapsed_s;
}

Milliseconds64 OwnProgress::stalled(const WatchdogLimits& limits) const {
  const Milliseconds64 without = without_computing_.stalled();
  return without > longest_computing(limits, reading_.kind) ? without : with_computing_.stalled();
}

}  // namespace titan::dist
