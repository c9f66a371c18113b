#include "guard/progress.h"

#include <time.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <span>
#include <utility>

#include "core/json.h"
#include "dist/flight_record.h"
#include "titan/core/error.h"

namespace titan::dist {

namespace {

// A rank computes if its CPUs were busy for this share of the time.
constexpr double kBusy = 0.2;
// An endless loop computes too: after this many limits without another sign, CPU time no longer counts as
// progress.
constexpr int kBusyLimits = 10;

double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// MiB that the kernel has read from storage for this process, or has to write there, not counting cached
// reads.
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

// Peers' collectives wait somewhat longer than the longest limit, and the watchdog must act before they give
// up.
std::chrono::milliseconds longest_computing(const WatchdogLimits& limits, ProgressKind kind) {
  const auto limit = limits.of(kind).time;
  const auto longest =
      std::max({limits.data.time, limits.compute.time, limits.checkpoint.time, limits.validation.time});
  return std::max(limit, std::min(kBusyLimits * limit, longest));
}

}  // namespace

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

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Beat, number, state, kind, what, step, stalled_ms, limit_ms, setting,
                                   silence_limit_ms, silence_setting, call, pid, host, pids, computes, traced,
                                   life)

std::string to_text(const Beat& beat) { return json_text(nlohmann::json(beat)); }

Beat beat_from(std::string_view text) {
  try {
    return parse_json(text).get<Beat>();
  } catch (const nlohmann::json::exception& error) {
    throw Error(str("cannot parse a rank's beat (do all ranks run the same program?): ", error.what()));
  }
}

namespace {

// Beats are sent and read at different times, so a beat that is two intervals old isn't late yet.
bool is_silent(const RankView& view, int64_t interval_ms) { return view.silent_ms * 2 > interval_ms * 5; }

bool has_begun(const RankView& view) { return view.beat && view.beat->state != RunState::NotBegun; }
bool has_left(const RankView& view) { return has_begun(view) && view.beat->state != RunState::Runs; }
bool runs(const RankView& view) { return has_begun(view) && !has_left(view); }

bool is_overdue(const RankView& view, int64_t interval_ms) {
  if (!runs(view) || view.beat->traced) return false;
  const Beat& beat = *view.beat;
  if (is_silent(view, interval_ms)) return view.silent_ms > beat.silence_limit_ms;
  const int64_t stalled_ms =
      beat.call.empty() ? beat.stalled_ms : std::min(beat.stalled_ms, view.unexcused_ms);
  return beat.kind != ProgressKind::Idle && stalled_ms > beat.limit_ms;
}

bool waits_in_call(const RankView& view, int64_t interval_ms) {
  return runs(view) && !view.beat->call.empty() && !is_silent(view, interval_ms);
}

// Others may have to wait for it, and it isn't overdue yet. One late beat doesn't change that.
bool is_excuse(const RankView& view, int64_t interval_ms) {
  if (!runs(view) || is_overdue(view, interval_ms)) return false;
  return view.beat->traced || (view.beat->call.empty() && view.beat->kind != ProgressKind::Compute);
}

std::string in_seconds(int64_t ms) { return str(std::round(static_cast<double>(ms) / 100) / 10, " s"); }

std::string name_rank(const RankView& view, int size) {
  if (!view.beat) return str("rank ", view.rank, " of ", size);
  return str("rank ", view.rank, " of ", size, " (", view.beat->host, ", pid ", view.beat->pid, ")");
}

std::string phase_of(const Beat& beat) {
  if (beat.step < 0) return beat.what;
  return str(beat.what == "step" ? "" : beat.what + " of ", "step ", beat.step);
}

std::string limit_text(int64_t limit_ms, const std::string& setting) {
  return str("limit ", in_seconds(limit_ms), setting.empty() ? "" : ", " + setting);
}

std::string limit_of(const Beat& beat) { return limit_text(beat.limit_ms, beat.setting); }

std::string complaint(const RankView& view, int64_t interval_ms) {
  if (!has_begun(view)) return "hasn't begun to train";
  const Beat& beat = *view.beat;
  if (has_left(view)) return str("has ended its training, last seen in ", phase_of(beat));
  if (is_silent(view, interval_ms))
    return str("has given no sign of life for ", in_seconds(view.silent_ms), " (",
               limit_text(beat.silence_limit_ms, beat.silence_setting), "), last seen in ", phase_of(beat),
               view.process.empty() ? "" : "; its process is " + view.process);
  if (is_overdue(view, interval_ms))
    return str("hangs in ", phase_of(beat), ", without progress for ", in_seconds(beat.stalled_ms), " (",
               limit_of(beat), ")", beat.computes ? ", although its CPUs are busy" : "");
  return str("hasn't joined the call that the others wait in: it is in ", phase_of(beat), ", for ",
             in_seconds(beat.stalled_ms), " without progress");
}

using Views = std::vector<const RankView*>;

/// Lists the first few ranks, as `describe` formats them, and counts the rest.
std::string list_some(const Views& ranks, const std::function<std::string(const RankView*)>& describe) {
  constexpr size_t most = 4;
  const std::string text = list_str(std::span(ranks).first(std::min(most, ranks.size())), "; ", describe);
  return ranks.size() > most ? str(text, "; and ", ranks.size() - most, " other ranks") : text;
}

std::string list_culprits(const Views& culprits, int size, int64_t interval_ms) {
  return list_some(culprits, [&](const RankView* view) {
    return str(name_rank(*view, size), " ", complaint(*view, interval_ms));
  });
}

std::string list_waiting(const Views& waiting) {
  return list_some(waiting, [](const RankView* view) {
    return str("rank ", view->rank, " waits in ", view->beat->call, ", in ", phase_of(*view->beat), ", for ",
               in_seconds(view->beat->stalled_ms), " (", limit_of(*view->beat), ")");
  });
}

using Condition = std::function<bool(const RankView&)>;

Views select(const std::vector<RankView>& ranks, const Condition& condition) {
  Views chosen;
  for (const RankView& view : ranks)
    if (condition(view)) chosen.push_back(&view);
  return chosen;
}

}  // namespace

bool has_excuse(const std::vector<RankView>& ranks, int64_t interval_ms) {
  return std::ranges::any_of(ranks, [&](const RankView& view) { return is_excuse(view, interval_ms); });
}

std::optional<Verdict> judge(const std::vector<RankView>& ranks, int size, int64_t interval_ms) {
  const auto overdue = [&](const RankView& view) { return is_overdue(view, interval_ms); };
  const auto silent = [&](const RankView& view) { return is_silent(view, interval_ms); };
  const auto waiting = [&](const RankView& view) { return waits_in_call(view, interval_ms); };
  const auto present = [](const RankView& view) { return !has_left(view); };
  const Views late = select(ranks, overdue);
  if (late.empty()) return std::nullopt;
  const Views at_fault = select(ranks, [&](const auto& view) { return overdue(view) && !waiting(view); });
  if (at_fault.empty() && has_excuse(ranks, interval_ms)) return std::nullopt;

  const Views lost = select(ranks, [&](const auto& view) { return overdue(view) && silent(view); });
  const Views elsewhere =
      select(ranks, [&](const auto& view) { return present(view) && !waiting(view) && !overdue(view); });
  const Views ended = select(ranks, [&](const auto& view) { return !present(view); });
  const Views& culprits = !lost.empty()        ? lost
                          : !at_fault.empty()  ? at_fault
                          : !elsewhere.empty() ? elsewhere
                                               : ended;
  const Views peers = select(ranks, [&](const auto& view) { return present(view) && waiting(view); });
  Verdict verdict;
  verdict.text = culprits.empty() ? "the ranks wait for each other, so they don't make the same calls"
                                  : list_culprits(culprits, size, interval_ms);
  if (!peers.empty()) verdict.text += str(". ", list_waiting(peers));
  for (const RankView* view : culprits) verdict.culprits.push_back(view->rank);
  for (const RankView& view : ranks)
    if (silent(view) || !present(view)) verdict.silent.push_back(view.rank);
  return verdict;
}

}  // namespace titan::dist
