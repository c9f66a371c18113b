// The report of a hang, its files, and the reason that a failing rank gives. The watchdog calls them:
// explain_failure when a rank of the job fails, the others when the job hangs.

#include "guard/hang_report.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <ctime>
#include <exception>
#include <optional>
#include <span>
#include <thread>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/file.h"
#include "core/json.h"
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
             beat.call.empty() ? "" : ", waiting in " + beat.call, ", without progress for ",
             static_cast<double>(beat.stalled_ms) / 1000, " s of ",
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

// Each rank that fails leaves its error under the next number. The first one waits for the others' and
// explains them all, because it may only have seen what another rank's error led to.

constexpr const char* kNumFailuresKey = "failures";
constexpr const char* kExplanationKey = "explanation";
constexpr const char* kReadKey = "explanations_read";

constexpr auto kExplanationLimit = 4500ms;
constexpr auto kReadLimit = 1s;
static_assert(kExplanationLimit + kReadLimit <= kFindsCauseWithin);

struct Failure {
  int rank = 0;
  std::string text;
  bool is_about_peer = false;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Failure, rank, text, is_about_peer)

std::string failure_key(int64_t number) { return str("failure/", number); }

// Returns the number of this failure, from 1 on.
int64_t leave_failure(c10d::Store& store, const FailureScene& scene) {
  const int64_t number = store.add(kNumFailuresKey, 1);
  store.set(failure_key(number),
            json_text(nlohmann::json(Failure{scene.rank, scene.failure, scene.is_about_peer})));
  return number;
}

// In the order in which they were left.
std::vector<Failure> read_failures(c10d::Store& store) {
  std::vector<std::string> keys;
  const int64_t count = store.add(kNumFailuresKey, 0);
  for (int64_t number = 1; number <= count; ++number) keys.push_back(failure_key(number));
  // A rank may have taken its number only just now.
  for (int look = 0; look < 10 && !store.check(keys); ++look) std::this_thread::sleep_for(20ms);
  std::erase_if(keys, [&](const std::string& key) { return !store.check({key}); });
  std::vector<Failure> failures;
  for (const auto& value : store.multiGet(keys))
    failures.push_back(parse_json(std::string(value.begin(), value.end())).get<Failure>());
  return failures;
}

// "checkpoint of step 5: rank 3 (node0): no space" -> 3; -1: no rank is named.
int first_rank_named(const std::string& text) {
  constexpr std::string_view kWord = "rank ";
  for (size_t at = text.find(kWord); at != std::string::npos; at = text.find(kWord, at + 1)) {
    int rank = -1;
    const char* number = text.data() + at + kWord.size();
    if (std::from_chars(number, text.data() + text.size(), rank).ec == std::errc()) return rank;
  }
  return -1;
}

// The first error that isn't about a peer; if there is none, the first. If several ranks report the same one,
// as they do when they agree that a save failed: that of the rank that it names, or of the lowest rank.
const Failure& cause_among(const std::vector<Failure>& failures) {
  auto cause = std::ranges::find(failures, false, &Failure::is_about_peer);
  if (cause == failures.end()) return failures.front();
  const int named = first_rank_named(cause->text);
  for (auto other = failures.begin(); other != failures.end(); ++other) {
    if (other->is_about_peer || other->text != cause->text) continue;
    if (other->rank == named) return *other;
    if (other->rank < cause->rank) cause = other;
  }
  return *cause;
}

std::string sentence_of(const Failure& cause, const std::vector<Failure>& failures) {
  if (cause.is_about_peer) return str("first to notice was rank ", cause.rank, ": ", cause.text);
  const bool is_shared = std::ranges::count(failures, cause.text, &Failure::text) > 1;
  return is_shared ? cause.text : str("rank ", cause.rank, " failed: ", cause.text);
}

// Returns the ranks whose count of beats doesn't change while three more are due. None is lost if all ranks
// report their failures in that time.
std::string lost_ranks(c10d::Store& store, int rank, int size) {
  const auto before = read_beats(store, size);
  const auto end = Clock::now() + 7 * slowest_beat(size) / 2;
  while (Clock::now() < end) {
    std::this_thread::sleep_for(100ms);
    if (store.add(kNumFailuresKey, 0) == size) return "";
  }
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

struct Cause {
  std::string text;
  int told_by = -1;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Cause, text, told_by)

// If no rank is lost, a missing record lies on a file system that this rank can't see.
Cause find_cause(c10d::Store& store, const FailureScene& scene) {
  const auto end = Clock::now() + kExplanationLimit;
  std::string text = lost_ranks(store, scene.rank, scene.size);
  const bool is_lost = !text.empty();
  auto failures = read_failures(store);
  if (!is_lost && cause_among(failures).is_about_peer && !scene.records.empty()) {
    // Joining the records takes half as long as reading them.
    const auto for_joining = (end - Clock::now()) / 3;
    text = flight_summary(scene.records, {.all_ranks_live = true, .end = end - for_joining});
    failures = read_failures(store);  // the error of a rank that took long to clean up
  }
  const Failure& cause = cause_among(failures);
  const std::string sentence = sentence_of(cause, failures);
  if (!is_lost && !cause.is_about_peer) return {sentence, cause.rank};
  return {str(text, text.empty() ? "" : "; ", sentence), -1};
}

// Rank 0 waits for the readers: its process may keep the store, and is about to end.
void let_others_read(c10d::Store& store, int size) {
  const auto end = Clock::now() + kReadLimit;
  while (Clock::now() < end && store.add(kReadKey, 0) + 1 < size) std::this_thread::sleep_for(20ms);
}

Cause wait_for_explanation(c10d::Store& store) {
  const auto end = Clock::now() + kExplanationLimit;
  while (!store.check({kExplanationKey})) {
    if (Clock::now() > end)
      return {str("the first rank to report a failure didn't find the cause within ",
                  std::chrono::duration<double>(kExplanationLimit).count(), " s"),
              -1};
    std::this_thread::sleep_for(20ms);
  }
  const Cause cause = parse_json(store.get_to_str(kExplanationKey)).get<Cause>();
  store.add(kReadKey, 1);
  return cause;
}

// Ranks learn of a failure when they are asked for their records: "failure of rank 0 itself: no space". Once the
// cause is found, a second request passes it on, because the store may end before a rank fails and asks for it:
// "failure of the job: lost: rank 1", or "failure of the job, caused by rank 0: no space".
constexpr std::string_view kItself = " itself: ";
std::string request_of(const FailureScene& scene) {
  return str(kFailureOf, "rank ", scene.rank, scene.is_about_peer ? ": " : kItself, scene.failure);
}

// The request comes first: once the explanation is there, the rank that keeps the store may end.
void leave_explanation(c10d::Store& store, const Cause& cause) {
  const std::string by = cause.told_by < 0 ? "" : str(", caused by rank ", cause.told_by);
  request_records(store, str(kFailureOf, kTheJob, by, ": ", cause.text));
  store.set(kExplanationKey, json_text(nlohmann::json(cause)));
}

// The cause, if it was found, or if the rank that asked for records failed by itself.
std::optional<Cause> cause_in(const std::string& request) {
  if (request.starts_with(str(kFailureOf, kTheJob))) {
    const size_t end = request.find(": ");
    return Cause{request.substr(end + 2), first_rank_named(request.substr(0, end))};
  }
  const int rank = first_rank_named(request);
  const std::string start = str(kFailureOf, "rank ", rank, kItself);
  if (rank < 0 || !request.starts_with(start)) return std::nullopt;
  return Cause{str("rank ", rank, " failed: ", request.substr(start.size())), rank};
}

Explanation explanation_of(const Cause& cause, const FailureScene& scene) {
  const bool is_told = cause.text.find(scene.failure) != std::string::npos;
  return {cause.text, cause.told_by, is_told || (scene.is_about_peer && cause.told_by >= 0),
          scene.is_about_peer};
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

bool is_error_of_call(const std::string& error, const FlightRecorder& recorder) {
  // A number that has left the ring isn't read.
  const uint64_t num_calls = recorder.num_calls();
  CallRecord call;
  for (uint64_t back = 1; back <= std::min<uint64_t>(num_calls, FlightRecorder::kLeastSlots); ++back)
    if (recorder.read(num_calls - back, call) && call.state == CallState::Failed &&
        error.find(call.failure()) != std::string::npos)
      return true;
  return false;
}

Explanation explain_failure(const FailureScene& scene) {
  try {
    const StorePtr store = scene.connect();
    if (!store) throw Error("the store is gone");
    Cause cause;
    if (leave_failure(*store, scene) == 1) {
      request_records(*store, request_of(scene));
      cause = find_cause(*store, scene);
      leave_explanation(*store, cause);
    } else {
      cause = wait_for_explanation(*store);
    }
    if (scene.rank == 0) let_others_read(*store, scene.size);
    return explanation_of(cause, scene);
  } catch (const std::exception&) {
    return explain_alone(
        scene, "the job's store is gone, and with it the process that keeps it, rank 0 or its launcher");
  }
}

// The rank's own error comes first if it isn't about a peer; then that of a rank that reported one.
Explanation explain_alone(const FailureScene& scene, const std::string& known) {
  const std::string last_words =
      scene.first_rank_last_words.empty() ? "" : ": " + scene.first_rank_last_words;
  if (!scene.is_about_peer)
    return {str("rank ", scene.rank, " failed: ", scene.failure, "; ", known, last_words), -1, true};
  if (const auto cause = cause_in(scene.record_request)) return explanation_of(*cause, scene);
  return {str(known, last_words, "; this is rank ", scene.rank, ": ", scene.failure), -1, true, true};
}

}  // namespace titan::dist
