#pragma once

// An event of the structured log, and its line.

#include <sys/types.h>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

namespace titan::train {

enum class EventKind : uint8_t { Start, End, Error, Instant };

struct StructuredEvent {
  const char* name = "";
  const char* caller = "";
  int64_t steady_ns = 0;
  int64_t step = 0;
  int64_t relative_step = 0;                                ///< of this process, from 1; 0 before its first
  double value = std::numeric_limits<double>::quiet_NaN();  ///< NaN: none; of an end: milliseconds
  pid_t thread = 0;
  uint8_t step_tags = 0;  ///< bits of kSavesTag, kValidatesTag
  EventKind kind = EventKind::Instant;
};

inline constexpr uint8_t kSavesTag = 1;
inline constexpr uint8_t kValidatesTag = 2;

/// Writes events as lines that a process's number, rank and host are part of.
class EventLines {
 public:
  EventLines(int rank, int local_rank);

  /// Wall clock = steady clock + offset, as of now: clocks drift and are set.
  void set_clock();

  /// `environment`: a JSON object. For the top of each file.
  std::string process_line(const std::string& environment);
  void append(std::string& text, const StructuredEvent& event);

 private:
  void append_head(std::string& text, int64_t steady_ns, const char* type);

  int64_t process_start_ns_;
  int64_t offset_ns_ = 0;
  int64_t previous_ns_;
  int64_t sequence_ = 0;
  std::string identity_;  // `, "rank": 0, ...`
};

int64_t steady_now_ns();

}  // namespace titan::train
