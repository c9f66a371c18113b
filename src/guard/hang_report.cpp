// The report of a hang, its files, and the reason that a failing rank gives. The watchdog calls them:
// explain_failure when a rank of the job fails, the others when the job hangs.

#include "guard/hang_report.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <exception>
#include <span>
#include <thread>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/file.h"
#include "core/threads.h"
#include "core/units.h"
#include "dist/flight_record.h"
#include "guard/flight_dump.h"
#include "guard/flight_report.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::dist {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr size_t kShownCalls = 8;

std::string last_calls(const FlightRecorder& recorder) {
  const auto calls = recorder.snapshot();
  if (calls.empty()) return "no collective was called\n";
  std::string text = "its last calls:\n";
  for (const CallRecord& call : std::span(calls).last(std::min(calls.size(), kShownCalls))) {
    const Clock::time_point start{std::chrono::nanoseconds(call.start_ns)};
    text += str("  ", call.number, " ", call.describe(), ", ", call.bytes, " bytes, ", name_of(call.state),
                ", ", std::round(seconds_since(start) * 100) / 100, " s ago\n");
  }
  return text;
}

std::string place_of(const Beat& beat) {
  return str(name_of(beat.kind), ", ", beat.what, beat.step < 0 ? "" : str(" of step ", beat.step),
             ", without progress for ", static_cast<double>(beat.stalled_ms) / 1000, " s of ",
             static_cast<double>(beat.limit_ms) / 1000);
}

std::string time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[40];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

extern "C" void end_hung_process(int /*signal*/) { _exit(kHungExitCode); }

// ---- the reason of a failure

constexpr const char* kFailuresKey = "failures";
constexpr const char* kExplanationKey = "explanation";
constexpr const char* kReadKey = "explanations_read";

constexpr auto kExplanationLimit = 6s;
// Time to join the records once they are read, which takes half as long as reading.
constexpr auto kJoinLimit = 1s;
constexpr auto kReadLimit = 1s;
static_assert(1s + kExplanationLimit + kReadLimit <= kExplainsWithin);

// Returns the ranks whose count of beats doesn't change while three more are due.
std::string lost_ranks(c10d::Store& store, int rank, int size) {
  const auto before = read_beats(store, size);
  std::this_thread::sleep_for(7 * slowest_beat(size) / 2);
  const auto after = read_beats(store, size);
  std::string text;
  int count = 0;
  for (int other = 0; other < size; ++other) {
    const auto &was = before[static_cast<size_t>(other)], &is = after[static_cast<size_t>(other)];
    const bool has_ended = is && is->state == RunState::Ended;
    if (other == rank || has_ended || (is && (!was || was->number != is->number))) continue;
    if (++count > 4) continue;
    text += str(text.empty() ? "lost: " : "; ",
                is ? is->life : str("rank ", other, ", which never sent a sign of life"));
  }
  return count > 4 ? str(text, " and ", count - 4, " more ranks") : text;
}

// If no rank is lost, a missing record lies on a file system that this rank can't see.
std::string find_cause(c10d::Store& store, const FailureScene& scene) {
  const auto end = Clock::now() + kExplanationLimit;
  std::string text = scene.size > 1 ? lost_ranks(store, scene.rank, scene.size) : "";
  if (text.empty() && !scene.records.empty() && scene.size > 1)
    text = flight_summary(scene.records, {.all_ranks_live = true, .end = end - kJoinLimit});
  return str(text, text.empty() ? "" : "; ", "first to fail was rank ", scene.rank, ": ", scene.failure);
}

// Rank 0 waits for the readers: its process may keep the store, and is about to end.
void let_others_read(c10d::Store& store, int size) {
  const auto end = Clock::now() + kReadLimit;
  while (Clock::now() < end && store.add(kReadKey, 0) + 1 < size) std::this_thread::sleep_for(20ms);
}

std::string wait_for_explanation(c10d::Store& store) {
  const auto end = Clock::now() + kExplanationLimit;
  while (!store.check({kExplanationKey})) {
    if (Clock::now() > end)
      return str("the rank that failed first didn't find the cause within ", kExplanationLimit.count(), " s");
    std::this_thread::sleep_for(20ms);
  }
  std::string text = store.get_to_str(kExplanationKey);
  store.add(kReadKey, 1);
  return text;
}

}  // namespace

std::string open_call(const FlightRecorder& recorder, ProgressKind kind) {
  const auto call = recorder.open_call(/*with_background=*/kind == ProgressKind::Checkpoint);
  return call ? call->describe() : "";
}

std::string hang_report(int rank, const Beat& beat, const FlightRecorder& recorder) {
  return str("rank ", rank, " (", beat.host, ", pid ", beat.pid, ") is in ", place_of(beat), "\n",
             last_calls(recorder), "its threads:\n", to_text(thread_stacks()));
}

std::filesystem::path stacks_path(const std::filesystem::path& folder, int rank) {
  return folder / str("stacks_", rank, ".txt");
}

// Writes on a side thread with a time limit, because the file system may be what hangs.
void leave_files(const HangFiles& files, SideThread& thread, std::chrono::milliseconds limit) {
  thread.post([files] {
    try {
      if (!files.folder.empty()) {
        make_folder(files.folder);
        write_file_atomic(stacks_path(files.folder, files.rank), time_now() + "\n" + files.report);
      }
    } catch (const std::exception& error) {
      log::error(str("the stacks can't be written: ", error.what()));
    }
    if (files.records) files.records->write(files.reason.c_str(), FlightExtent::Last);
  });
  if (!thread.wait(limit))
    log::error(str("the files of this hang can't be written: ", files.folder.string(), " doesn't answer"));
}

void end_process_after(std::chrono::seconds limit) {
  signal(SIGALRM, end_hung_process);
  sigset_t alarms;
  sigemptyset(&alarms);
  sigaddset(&alarms, SIGALRM);
  pthread_sigmask(SIG_UNBLOCK, &alarms, nullptr);
  alarm(static_cast<unsigned>(limit.count()));
}

std::string explain_failure(const FailureScene& scene) {
  try {
    const StorePtr store = scene.connect();
    if (!store) throw Error("the store is gone");
    const bool is_first = store->add(kFailuresKey, 1) == 1;
    std::string text;
    if (is_first) {
      request_records(*store, str(kFailureOf, "rank ", scene.rank, ": ", scene.failure));
      text = find_cause(*store, scene);
      store->set(kExplanationKey, text);
    } else {
      text = wait_for_explanation(*store);
    }
    if (scene.rank == 0) let_others_read(*store, scene.size);
    return text;
  } catch (const std::exception&) {
    return explain_alone(
        scene, "the job's store is gone, and with it the process that keeps it, rank 0 or its launcher");
  }
}

std::string explain_alone(const FailureScene& scene, const std::string& known) {
  return str(known, scene.first_rank_last_words.empty() ? "" : ": " + scene.first_rank_last_words,
             "; this is rank ", scene.rank, ": ", scene.failure);
}

}  // namespace titan::dist
