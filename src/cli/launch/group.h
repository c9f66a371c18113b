#pragma once

// A group of ranks, from the start of the first process to the end of the last one; and the places where groups may
// run.

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/launch/process.h"

namespace titan::cli {

struct GroupOptions {
  const std::vector<std::string>& command;
  const ShownRanks& shown;
  std::chrono::milliseconds grace;
  std::chrono::milliseconds stop_grace;
  int num_places;       ///< places that share the host's cores
  Variables variables;  ///< for every rank, besides those that identify it
  /// When the group should stop because a larger one could start. Called again after each SIGUSR2, after
  /// `on_rejoin`.
  std::function<std::optional<std::chrono::steady_clock::time_point>()> next_growth;
  std::function<void()> on_rejoin;
};

class RankGroup {
 public:
  using Clock = std::chrono::steady_clock;
  enum class End {
    Done,       ///< all ranks returned 0
    Failed,     ///< see report()
    Told,       ///< asked to end by the signal told_to_end(), and not all ranks returned 0
    Outgrown,   ///< stopped because a larger group can start; see ended_badly()
    CantStart,  ///< see start_error()
  };

  RankGroup(int num_ranks, GroupOptions options, SignalReader& signals);
  /// Kills ranks that still run, which happens only after an exception.
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  End run();

  int told_to_end() const { return told_to_end_; }  ///< the signal; 0: none
  std::chrono::steady_clock::time_point told_at() const { return told_at_; }
  bool told_twice() const { return told_twice_; }  ///< asked to end at once
  const std::string& start_error() const { return start_error_; }
  /// After a request to end: the ranks that didn't return 0, and how they ended; empty: all returned 0.
  std::string ended_badly() const;
  bool has_failed() const { return first_failed_ >= 0; }  ///< a rank failed, asked to end or not
  /// The exit code of the rank that failed first; 128 + signal if a signal ended it.
  int exit_code() const;
  /// Ranks that failed by themselves, not because others did: those that a signal ended, hung ones, or else the
  /// first one.
  std::vector<int> lost() const;
  std::string how_lost(int rank) const;
  /// A box with the rank that failed first and its last lines.
  std::string report() const;
  std::chrono::duration<double> run_time() const { return Clock::now() - started_; }

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

  bool start(int rank, const ListeningSocket& store);
  Variables variables_of(int rank, const ListeningSocket& store) const;
  void poll_once();
  int wait_ms() const;
  void look_at_clock();
  void reap();
  bool reap(Rank& rank);
  void note_failure(int rank);
  bool is_cause_of_first(const Rank& rank) const;
  void handle(int signal);
  void signal_all(int signal);
  void ask_what_they_do();
  void ask_for_end(int signal);
  void end_ranks(std::chrono::milliseconds grace);
  void tell_ranks(int signal);
  /// Sends SIGTERM with a note (interruption.h).
  void tell_why(int note);
  void end_stopped();
  void end_hung();
  void kill_all();
  void tell_undying();
  int num_running() const;
  bool all_returned_0() const;
  void end_leftovers() const;
  void drain();

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

/// A job of N ranks has N places on its host, each with its own GPU if there are enough. A lost rank's place stays
/// empty for a while, in case the place caused the loss.
class RankPlaces {
 public:
  using Time = std::chrono::steady_clock::time_point;
  struct Options {
    int num_places = 1;
    int min_ranks = 1;
    std::optional<std::chrono::milliseconds> rejoin_after = {};  ///< unset: after bring_back()
    std::function<bool(int)> fits = {};                          ///< unset: any number
  };

  explicit RankPlaces(Options options);

  /// Leaves the place empty: twice as long as last time if it hasn't been in use that long, so that a broken GPU
  /// causes fewer and fewer restarts. Does nothing if groups must have the full size.
  void lose(int place, Time now);
  void bring_back();

  /// The places for a group that starts now: the lowest ones, as many as are available and fit. Empty: too few.
  std::vector<int> available(Time now) const;
  /// When a group could have more than `size` ranks; nullopt: not before bring_back().
  std::optional<Time> next_growth(int size) const;

 private:
  int largest_fit(int num_free) const;

  Options options_;
  std::vector<Time> free_at_;                        // by place
  std::vector<std::chrono::milliseconds> absences_;  // the last absence of each
};

/// How long to wait before a start after `num_short_runs` starts in a row that failed early: 0 after the first,
/// then 1, 2, 4 ... s, at most `longest`.
std::chrono::milliseconds restart_delay(int num_short_runs, std::chrono::milliseconds longest);

/// The GPUs of `places` for CUDA_VISIBLE_DEVICES, taken from `visible` (the variable's value; nullopt: devices
/// 0 to `num_devices` - 1). nullopt: leave the variable as it is, because all places are used or there are fewer
/// GPUs than places.
std::optional<std::string> devices_of_places(const std::vector<int>& places, int num_places,
                                             const std::optional<std::string>& visible, int num_devices);
/// The number of GPUs of this host; doesn't use CUDA.
int num_gpus_of_host();

}  // namespace titan::cli
