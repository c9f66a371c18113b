// [Note: who failed]
//   first   the rank whose end was seen first. A rank that a signal ended comes before ranks that ended with an
//           error: their exit codes may be complaints about it
//   hung    a rank that was stopped (SIGSTOP) when another one failed: the others' time limits ran out on it; or
//           a rank that had to be killed after another one gave up on its peers (dist::kHungExitCode): its own
//           watchdog is stuck with it, as in a frozen container or a system call that never returns
//   lost    the ranks whose places a next group shouldn't use: all that a signal not from us ended; else the
//           hung ones; else the first one
// Hangs of any other kind are for the program to detect (`titan train` has a watchdog on every rank) and show up
// here as exit codes.

#include "cli/launch/group.h"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <utility>

#include <c10/util/StringUtil.h>

#include "titan/core/error.h"
#include "titan/guard/watchdog.h"
#include "train/policies/interruption.h"

namespace titan::cli {

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// How long the other ranks get when one fails after a request to end.
constexpr auto kStopAfterFailure = seconds(30);
/// How long ranks that give up on a peer take to end, each by its own watchdog: the last one hears of the verdict
/// a second after the first, and reports what it knows.
constexpr auto kWatchdogsEnd = dist::kHangEndsWithin + seconds(2);
/// After this time a process that SIGKILL hasn't ended is reported.
constexpr auto kDying = seconds(5);
/// How many times an absence may be longer than the first.
constexpr int kMostDoubled = 64;

bool failed(int status) { return !WIFEXITED(status) || WEXITSTATUS(status) != 0; }

std::string describe(int status) {
  if (WIFEXITED(status)) return str("exit code ", WEXITSTATUS(status));
  return str("killed by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")",
             WCOREDUMP(status) ? ", core dumped" : "");
}

/// Whether its watchdog gave up on a peer.
bool gave_up(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == dist::kHungExitCode; }

/// Whether a signal ended it that is not sent to a whole job, and that no failure of a peer causes.
bool is_own_end(int status) {
  if (!WIFSIGNALED(status)) return false;
  const int signal = WTERMSIG(status);
  return signal == SIGKILL || signal == SIGSEGV || signal == SIGBUS || signal == SIGILL || signal == SIGFPE;
}

using Clock = std::chrono::steady_clock;

std::vector<std::string> device_names(const std::optional<std::string>& visible, int num_devices) {
  std::vector<std::string> names;
  if (!visible) {
    for (int device = 0; device < num_devices; ++device) names.push_back(std::to_string(device));
    return names;
  }
  std::istringstream list(*visible);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  return names;
}

/// A group while it runs.
class RankGroup {
 public:
  RankGroup(int num_ranks, GroupOptions options, SignalReader& signals)
      : options_(std::move(options)),
        signals_(signals),
        ranks_(num_ranks),
        grow_at_(options_.next_growth()) {}

  /// Kills ranks that still run, which happens only after an exception.
  ~RankGroup() {
    signal_all(SIGKILL);
    for (auto& rank : ranks_) {
      if (rank.running) waitpid(rank.pid, nullptr, 0);
    }
  }

  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  GroupEnd run() {
    {
      const ListeningSocket store;
      bool all_started = true;
      for (int rank = 0; rank < static_cast<int>(ranks_.size()) && all_started; ++rank)
        all_started = start(rank, store);
      if (!all_started) signal_all(SIGKILL);
    }  // from here on only rank 0 listens: the others notice at once if it ends
    while (std::ranges::any_of(ranks_, &Rank::running)) poll_once();
    end_leftovers();
    for (auto& pipe : pipes_) pipe.drain();
    GroupEnd end{.kind = kind(),
                 .told_to_end = told_to_end_,
                 .told_at = told_at_,
                 .told_twice = told_twice_,
                 .start_error = start_error_,
                 .ended_badly = ended_badly(),
                 .run_time = Clock::now() - started_};
    if (first_failed_ < 0) return end;
    end.has_failed = true;
    end.exit_code = exit_code();
    for (int rank : lost()) end.lost.push_back({rank, how_lost(rank)});
    end.report = report();
    return end;
  }

 private:
  struct Rank {
    pid_t pid = -1;
    bool running = false;
    bool stopped = false;        // by SIGSTOP or the like, and not continued
    const char* hung = nullptr;  // how it hung when another rank failed
    bool killed = false;         // by us, as hung ranks are
    int status = 0;              // from waitpid
    Tail tail;
  };

  bool start(int rank, const ListeningSocket& store) {
    const ChildSpec spec{.command = options_.command,
                         .set = variables_of(rank, store),
                         .unset = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
                                   "TORCHELASTIC_RESTART_COUNT", "TITAN_STORE_FD"},
                         .inherited_fd = rank == 0 ? store.fd : -1};
    Child child;
    try {
      child = start_child(spec);
    } catch (const Error& error) {
      start_error_ = error.what();
      return false;
    }
    ranks_[rank].pid = child.pid;
    ranks_[rank].running = true;
    const bool shown = options_.shown.contains(rank);
    pipes_.emplace_back(child.stdout_fd, shown ? STDOUT_FILENO : -1, rank, ranks_[rank].tail);
    pipes_.emplace_back(child.stderr_fd, shown ? STDERR_FILENO : -1, rank, ranks_[rank].tail);
    if (child.exec_errno != 0) start_error_ = std::strerror(child.exec_errno);
    return child.exec_errno == 0;
  }

  Variables variables_of(int rank, const ListeningSocket& store) const {
    const int num_ranks = static_cast<int>(ranks_.size());
    Variables variables = options_.variables;
    variables.insert({{"RANK", std::to_string(rank)},
                      {"WORLD_SIZE", std::to_string(num_ranks)},
                      {"LOCAL_RANK", std::to_string(rank)},
                      {"LOCAL_WORLD_SIZE", std::to_string(num_ranks)},
                      {"MASTER_ADDR", store.host},
                      {"MASTER_PORT", std::to_string(store.port)},
                      {"TITAN_LAUNCH", "1"}});
    if (rank == 0) variables["TITAN_STORE_FD"] = std::to_string(store.fd);
    if (!std::getenv("OMP_NUM_THREADS")) {
      variables["OMP_NUM_THREADS"] = std::to_string(std::max(1, num_cores() / options_.num_places));
    }
    // The ranks write to pipes, but their output ends up on a terminal.
    if (isatty(STDOUT_FILENO) && !std::getenv("NO_COLOR")) variables["FORCE_COLOR"] = "1";
    return variables;
  }

  void poll_once() {
    std::vector<pollfd> ready = {{signals_.fd(), POLLIN, 0}};
    for (const auto& pipe : pipes_) ready.push_back({pipe.fd(), POLLIN, 0});  // negative ones are skipped
    poll(ready.data(), ready.size(), wait_ms());
    for (size_t i = 0; i < pipes_.size(); ++i) {
      if (ready[i + 1].revents) pipes_[i].drain();
    }
    while (const int signal = signals_.next()) handle(signal);
    look_at_clock();
  }

  int wait_ms() const {
    const auto next = kill_at_ ? kill_at_ : grow_at_;
    if (!next) return -1;
    const auto left = std::chrono::duration_cast<milliseconds>(*next - Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left + 1, 0, 3'600'000));
  }

  void look_at_clock() {
    const auto now = Clock::now();
    if (kill_at_ && now >= *kill_at_) {
      if (!killed_at_) {
        killed_at_ = now;
        end_hung();
      }
      for (auto& rank : ranks_) rank.killed |= rank.running;
      signal_all(SIGKILL);
      if (now >= *killed_at_ + kDying) tell_undying();
      kill_at_ = now + seconds(1);
    } else if (!kill_at_ && grow_at_ && now >= *grow_at_) {
      outgrown_ = true;
      tell_why(train::kGroupGrows);
      tell_ranks(SIGTERM);
    }
  }

  void reap() {
    int failed_now = -1;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      if (!reap(ranks_[i])) continue;
      const int status = ranks_[i].status;
      // If several fail at once, a rank that a signal ended is the cause.
      if (failed(status) && (failed_now < 0 || WIFSIGNALED(status))) failed_now = static_cast<int>(i);
    }
    if (failed_now >= 0) note_failure(failed_now);
  }

  bool reap(Rank& rank) {
    int status = 0;
    while (rank.running && waitpid(rank.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) == rank.pid) {
      rank.stopped = WIFSTOPPED(status);
      if (!WIFEXITED(status) && !WIFSIGNALED(status)) continue;
      rank.status = status;
      rank.running = false;
      return true;
    }
    return false;
  }

  void note_failure(int rank) {
    if (first_failed_ >= 0 && is_cause_of_first(ranks_[rank])) first_failed_ = rank;
    if (first_failed_ >= 0 || killed_at_) return;
    first_failed_ = rank;
    failed_after_ = Clock::now() - started_;
    // Ranks that were asked to end may be waiting for this one.
    if (kill_at_) {
      kill_at_ = std::min(*kill_at_, Clock::now() + kStopAfterFailure);
      return;
    }
    const bool hung = gave_up(ranks_[rank].status);
    kill_at_ = Clock::now() + (hung ? std::max<milliseconds>(options_.grace, kWatchdogsEnd) : options_.grace);
    // Only the ranks get the reason, not the processes that they have started.
    tell_why(train::kPeerHasFailed);
    signal_all(SIGTERM);
    end_stopped();
  }

  // A rank that a signal of someone else ended is gone for its peers before its process has ended here: peers may
  // have failed because of it by then.
  bool is_cause_of_first(const Rank& rank) const {
    return !rank.killed && WIFEXITED(ranks_[first_failed_].status) && WIFSIGNALED(rank.status) &&
           WTERMSIG(rank.status) != SIGTERM;
  }

  void handle(int signal) {
    if (signal == SIGCHLD) return reap();
    if (asks_for_end(signal)) return ask_for_end(signal);
    if (signal == SIGQUIT) return ask_what_they_do();
    options_.on_rejoin();
    grow_at_ = options_.next_growth();
  }

  void signal_all(int signal) {
    for (const auto& rank : ranks_) {
      if (rank.running) kill(-rank.pid, signal);
    }
  }

  // Ranks report what they are doing; nothing ends.
  void ask_what_they_do() {
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      if (ranks_[rank].running && signal_takers(ranks_[rank].pid, SIGQUIT) == 0)
        tell("rank ", rank, " has no handler for SIGQUIT (yet): not sent");
  }

  void ask_for_end(int signal) {
    if (told_to_end_ == 0) {
      told_to_end_ = signal;
      told_at_ = Clock::now();
      return tell_ranks(signal);
    }
    if (Clock::now() - told_at_ < kSameSignal) return;
    told_twice_ = true;
    signal_all(SIGKILL);
  }

  void tell_ranks(int signal) {
    if (!kill_at_) kill_at_ = Clock::now() + options_.stop_grace;
    signal_all(signal);
  }

  /// Sends SIGTERM with a note (interruption.h).
  void tell_why(int note) {
    for (const auto& rank : ranks_)
      if (rank.running) sigqueue(rank.pid, SIGTERM, {.sival_int = note});
  }

  // A stopped process doesn't react to SIGTERM.
  void end_stopped() {
    for (auto& rank : ranks_) {
      if (!rank.running || !rank.stopped) continue;
      rank.hung = "it was stopped when another failed";
      rank.killed = true;
      kill(-rank.pid, SIGKILL);
    }
  }

  // Called at the end of the grace period.
  void end_hung() {
    if (first_failed_ < 0 || !gave_up(ranks_[first_failed_].status)) return;
    for (auto& rank : ranks_)
      if (rank.running && !rank.hung) rank.hung = "it didn't end when another gave up on its peers";
  }

  // It may be in state D (a file system, a driver), or held by a debugger. Nothing is started while it exists.
  void tell_undying() {
    if (std::exchange(told_undying_, true)) return;
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      if (ranks_[rank].running)
        tell("rank ", rank, " (pid ", ranks_[rank].pid, ", state ", process_state(ranks_[rank].pid),
             ") doesn't end although it was killed; waiting for it");
  }

  // Ends processes that a rank started and that outlived it.
  void end_leftovers() const {
    if (!kill_at_) return;
    for (const auto& rank : ranks_) {
      if (rank.pid > 0) kill(-rank.pid, SIGKILL);
    }
  }

  GroupEnd::Kind kind() const {
    if (!start_error_.empty()) return GroupEnd::Kind::CantStart;
    if (told_to_end_ != 0) return ended_badly().empty() ? GroupEnd::Kind::Done : GroupEnd::Kind::Told;
    if (outgrown_) return GroupEnd::Kind::Outgrown;
    return first_failed_ >= 0 ? GroupEnd::Kind::Failed : GroupEnd::Kind::Done;
  }

  int exit_code() const {
    const int status = ranks_[first_failed_].status;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  std::vector<int> lost() const {
    std::vector<int> own, hung;
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      const bool is_first = rank == first_failed_ && WIFSIGNALED(ranks_[rank].status);
      if (ranks_[rank].hung) hung.push_back(rank);
      if (!ranks_[rank].killed && (is_first || is_own_end(ranks_[rank].status))) own.push_back(rank);
    }
    if (!own.empty()) return own;
    return hung.empty() ? std::vector<int>{first_failed_} : hung;
  }

  std::string how_lost(int rank) const {
    return ranks_[rank].hung ? str("hung: ", ranks_[rank].hung) : describe(ranks_[rank].status);
  }

  std::string ended_badly() const {
    std::string text;
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      if (failed(ranks_[rank].status))
        text += str(text.empty() ? "" : ", ", "rank ", rank, " (",
                    ranks_[rank].killed ? "it was killed because it didn't end in time"
                                        : describe(ranks_[rank].status),
                    ")");
    return text;
  }

  std::string report() const {
    const std::string thick(78, '='), thin(78, '-');
    const Rank& rank = ranks_[first_failed_];
    std::string text = str("\n", thick, "\nrank ", first_failed_, " of ", ranks_.size(),
                           " failed first: ", describe(rank.status), ", after ",
                           static_cast<int>(failed_after_.count() * 10) / 10.0, " s (pid ", rank.pid, ")\n");
    for (int other : lost())
      if (ranks_[other].hung)
        text += str("rank ", other, " ", how_lost(other), " (pid ", ranks_[other].pid, ")\n");
    text += thin + (rank.tail.lines().empty() ? "\nIt printed nothing.\n" : "\nIts last lines:\n");
    for (const auto& line : rank.tail.lines()) text += "  " + line + "\n";
    return text + thick + "\n";
  }

  GroupOptions options_;
  SignalReader& signals_;
  std::vector<Rank> ranks_;
  std::vector<OutputPipe> pipes_;
  Clock::time_point started_ = Clock::now();
  std::optional<Clock::time_point> kill_at_;    // set when the ranks are asked to end
  std::optional<Clock::time_point> killed_at_;  // when they were first killed
  std::optional<Clock::time_point> grow_at_;
  int first_failed_ = -1;
  std::chrono::duration<double> failed_after_{};
  bool outgrown_ = false;
  int told_to_end_ = 0;          // the signal
  Clock::time_point told_at_{};  // when it came
  bool told_twice_ = false;
  bool told_undying_ = false;
  std::string start_error_;
};

}  // namespace

GroupEnd run_group(int num_ranks, GroupOptions options, SignalReader& signals) {
  return RankGroup(num_ranks, std::move(options), signals).run();
}

RankPlaces::RankPlaces(Options options)
    : options_(std::move(options)),
      free_at_(options_.num_places, Time::min()),
      absences_(options_.num_places, milliseconds(0)) {}

void RankPlaces::lose(int place, Time now) {
  if (options_.min_ranks >= options_.num_places) return;
  if (!options_.rejoin_after) {
    free_at_[place] = Time::max();
    return;
  }
  milliseconds& absence = absences_[place];
  const bool comes_again = absence.count() > 0 && now < free_at_[place] + absence;
  absence =
      comes_again ? std::min(2 * absence, kMostDoubled * *options_.rejoin_after) : *options_.rejoin_after;
  free_at_[place] = now + absence;
}

void RankPlaces::bring_back() {
  std::fill(free_at_.begin(), free_at_.end(), Time::min());
  std::fill(absences_.begin(), absences_.end(), milliseconds(0));
}

int RankPlaces::largest_fit(int num_free) const {
  for (int size = num_free; size >= options_.min_ranks; --size)
    if (!options_.fits || options_.fits(size)) return size;
  return 0;
}

std::vector<int> RankPlaces::available(Time now) const {
  std::vector<int> places;
  for (int place = 0; place < options_.num_places; ++place)
    if (free_at_[place] <= now) places.push_back(place);
  places.resize(largest_fit(static_cast<int>(places.size())));
  return places;
}

std::optional<RankPlaces::Time> RankPlaces::next_growth(int size) const {
  std::vector<Time> times = free_at_;
  std::sort(times.begin(), times.end());
  for (int num_free = size + 1; num_free <= options_.num_places; ++num_free) {
    const Time time = times[num_free - 1];
    if (time == Time::max()) break;
    if (largest_fit(num_free) > size) return time;
  }
  return std::nullopt;
}

milliseconds restart_delay(int num_short_runs, milliseconds longest) {
  if (num_short_runs <= 1) return milliseconds(0);
  return std::min<milliseconds>(longest, seconds(1 << std::min(num_short_runs - 2, 20)));
}

std::optional<std::string> devices_of_places(const std::vector<int>& places, int num_places,
                                             const std::optional<std::string>& visible, int num_devices) {
  const std::vector<std::string> names = device_names(visible, num_devices);
  if (static_cast<int>(places.size()) == num_places || static_cast<int>(names.size()) < num_places) return {};
  std::vector<std::string> own;
  for (int place : places) own.push_back(names[place]);
  return c10::Join(",", own);
}

int num_gpus_of_host() {
  std::error_code none;
  std::filesystem::directory_iterator gpus("/proc/driver/nvidia/gpus", none);
  return none ? 0 : static_cast<int>(std::distance(begin(gpus), end(gpus)));
}

}  // namespace titan::cli
