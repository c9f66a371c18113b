// The local launcher: starts groups of ranks, one after another, until a group is done or a restart is
// useless. launch/group.h is about one group.

#include "cli/launch/launch.h"

#include <poll.h>
#include <unistd.h>
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <sstream>

#include <c10/util/StringUtil.h>

#include "checkpoint/peer/peer_folder.h"
#include "cli/launch/group.h"
#include "titan/core/error.h"

namespace titan::cli {

int launch_command(const Arguments& words) { return launch_local(parse_launch_arguments(words)); }

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// A group that ran this long started correctly.
constexpr auto kLongRun = std::chrono::seconds(60);

int smallest_group(const LaunchOptions& options) {
  return options.restarts.min_ranks > 0 ? options.restarts.min_ranks : options.num_ranks;
}

/// The largest ratio of a place's absence to its first one.
constexpr int kMostDoubled = 64;

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

int parse_rank(std::string_view text, int num_ranks) {
  int rank = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || rank < 0 ||
      rank >= num_ranks) {
    throw ConfigError(
        str("--log-rank: '", text, "' isn't a rank from 0 to ", num_ranks - 1, ", 'all' or 'none'"));
  }
  return rank;
}

class Launcher {
 public:
  Launcher(const LaunchOptions& options, std::string job_id)
      : options_(options),
        job_id_(std::move(job_id)),
        shown_(options.log_rank, options.num_ranks),
        places_({.num_places = options.num_ranks,
                 .min_ranks = smallest_group(options),
                 .rejoin_after = options.restarts.rejoin_after,
                 .fits = options.restarts.fits}) {}

  int run() {
    int code = 0;
    try {
      code = run_groups();
    } catch (...) {
      save_memory();
      throw;
    }
    save_memory();
    if (stop_signal_ != 0 && options_.on_end_without_ranks) options_.on_end_without_ranks(stop_signal_);
    return code;
  }

 private:
  int run_groups() {
    while (find_places()) {
      const int num_ranks = static_cast<int>(group_.size());
      if (num_starts_ > 0)
        tell("start ", num_starts_ + 1, " (restart ", num_restarts_, " of ", options_.restarts.max_restarts,
             "): ", num_ranks, " of ", options_.num_ranks, " ranks, at places ", c10::Join(", ", group_));
      GroupOptions group = group_options();
      ++num_starts_;
      const GroupEnd end = run_group(num_ranks, std::move(group), signals_);
      if (end.stop_signal != 0) stop_requested_at_ = end.stop_requested_at;
      is_hurried_ = end.stop_requested_twice;
      if (const auto code = after(end)) return *code;
    }
    return 128 + stop_signal_;
  }

  // Ranks that returned 0 have removed their states from memory. If ranks were lost or couldn't save, only
  // the launcher can save their states.
  void save_memory() {
    SecondRequest second(stop_requested_at_);
    const auto gives_up = [&] { return is_hurried_ || second.has_come(signals_); };
    for (const checkpoint::LeftState& state :
         checkpoint::end_peer_folders(options_.memory_folder, job_id_, gives_up)) {
      if (state.problem.empty())
        tell("the state after step ", state.step,
             ", which was only in memory, is saved: ", state.disk.string());
      else
        tell("the state after step ", state.step, " remains in ", state.memory.string(),
             " and isn't on disk: ", state.problem, ". To resume from it, copy that folder ",
             state.disk.empty() ? "to the run's other steps" : str("to ", state.disk.string()),
             " before you start the run again, which removes it from memory");
    }
  }

  GroupOptions group_options() {
    return {.job = options_,
            .shown = shown_,
            .variables = variables(),
            .next_growth = [this] { return places_.next_growth(static_cast<int>(group_.size())); },
            .on_rejoin = [this] { places_.bring_back(); }};
  }

  Variables variables() const {
    Variables variables = {{"TITAN_JOB_ID", job_id_},
                           {"TITAN_RESTART_COUNT", std::to_string(num_starts_)},
                           {"TITAN_MAX_RESTARTS", std::to_string(options_.restarts.max_restarts)}};
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    const auto devices =
        devices_of_places(group_, options_.num_ranks,
                          visible ? std::optional<std::string>(visible) : std::nullopt, num_gpus_of_host());
    if (devices) variables["CUDA_VISIBLE_DEVICES"] = *devices;
    return variables;
  }

  std::optional<int> after(const GroupEnd& end) {
    switch (end.kind) {
      case GroupEnd::Kind::Done:
        return 0;
      case GroupEnd::Kind::Stopped:
        tell("not all ranks shut down cleanly: ", end.ended_badly,
             "; steps after the newest complete checkpoint aren't saved");
        return 128 + end.stop_signal;
      case GroupEnd::Kind::CantStart:
        return after_no_start(end);
      case GroupEnd::Kind::Failed:
        return after_failure(end);
      case GroupEnd::Kind::Outgrown:
        return after_growth(end);
    }
    return std::nullopt;
  }

  /// Returns the exit code, or nullopt for another group.
  std::optional<int> after_failure(const GroupEnd& end) {
    write_all(STDERR_FILENO, end.report);
    const RestartOptions& restarts = options_.restarts;
    if (restarts.max_restarts == 0) return end.exit_code;
    if (restarts.final_codes.count(end.exit_code)) {
      tell("no restart: exit code ", end.exit_code, " is final");
      return end.exit_code;
    }
    if (!may_restart()) {
      tell("giving up after ", num_restarts_, " restart(s) (--max-restarts)");
      return end.exit_code;
    }
    ++num_restarts_;
    num_short_runs_ = end.run_time < kLongRun ? num_short_runs_ + 1 : 0;
    lose_places(end);
    return std::nullopt;
  }

  // A restart may help if the program existed before (it is being replaced), or the host is out of processes.
  std::optional<int> after_no_start(const GroupEnd& end) {
    tell("cannot start '", options_.command[0], "': ", end.start_error);
    if (num_starts_ == 1 || !may_restart()) return 127;
    ++num_restarts_;
    num_short_runs_ = std::max(num_short_runs_, 1) + 1;
    return std::nullopt;
  }

  // The larger group resumes from where this one stopped.
  std::optional<int> after_growth(const GroupEnd& end) {
    if (end.run_time >= kLongRun) num_short_runs_ = 0;
    if (end.ended_badly.empty()) return std::nullopt;
    tell("when asked to stop for a larger group, not all ranks shut down cleanly: ", end.ended_badly,
         "; steps after the newest checkpoint are repeated");
    const bool is_final = end.has_failed && options_.restarts.final_codes.count(end.exit_code);
    return is_final ? after_failure(end) : std::nullopt;
  }

  bool may_restart() const { return num_restarts_ < options_.restarts.max_restarts; }
  void lose_places(const GroupEnd& end) {
    const auto now = Clock::now();  // one time for all of them, so that they return together
    for (const auto& [rank, how] : end.lost) {
      tell("rank ", rank, " is lost (", how, ")");
      places_.lose(group_[rank], now);
    }
  }

  /// Returns false when asked to end before there are enough places.
  bool find_places() {
    const auto earliest = Clock::now() + restart_delay(num_short_runs_, options_.restarts.longest_delay);
    while (Clock::now() < earliest)
      if (!wait_until(earliest)) return false;
    for (bool logged = false; (group_ = places_.available(Clock::now())).empty(); logged = true) {
      const auto next = places_.next_growth(0);
      if (!logged)
        tell("too few ranks are left for --min-ranks ", smallest_group(options_), "; waiting ",
             next ? "for one to return" : "for SIGUSR2, which brings all back");
      if (!wait_until(next)) return false;
    }
    return true;
  }

  /// Returns false when asked to end. Returns at SIGUSR2, too.
  bool wait_until(std::optional<Clock::time_point> time) {
    milliseconds left(-1);
    if (time) left = std::max(std::chrono::ceil<milliseconds>(*time - Clock::now()), milliseconds(0));
    pollfd ready{signals_.fd(), POLLIN, 0};
    poll(&ready, 1, static_cast<int>(std::min<int64_t>(left.count(), 3'600'000)));
    handle_between_groups();
    return stop_signal_ == 0;
  }

  void handle_between_groups() {
    while (const int signal = signals_.next()) {
      if (signal == SIGUSR2) places_.bring_back();
      if (!asks_for_end(signal)) continue;
      stop_signal_ = signal;
      if (!stop_requested_at_) stop_requested_at_ = Clock::now();
    }
  }

  const LaunchOptions& options_;
  const std::string job_id_;
  ShownRanks shown_;
  SignalReader signals_;
  RankPlaces places_;
  std::vector<int> group_;  // places of its ranks
  int num_starts_ = 0;
  int num_restarts_ = 0;  // growing a group isn't counted
  int num_short_runs_ = 0;
  int stop_signal_ = 0;                                 // the signal, if no rank was running
  std::optional<Clock::time_point> stop_requested_at_;  // from the launcher or a group
  bool is_hurried_ = false;                             // asked to end at once
};

}  // namespace

ShownRanks::ShownRanks(const std::string& text, int num_ranks) : all_(text == "all") {
  if (all_ || text == "none") return;
  size_t start = 0;
  while (start <= text.size()) {
    const size_t comma = std::min(text.find(',', start), text.size());
    ranks_.insert(parse_rank(std::string_view(text).substr(start, comma - start), num_ranks));
    start = comma + 1;
  }
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
  return std::min<milliseconds>(longest, std::chrono::seconds(1 << std::min(num_short_runs - 2, 20)));
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

int launch_local(const LaunchOptions& options) {
  const RestartOptions& restarts = options.restarts;
  if (restarts.min_ranks > options.num_ranks)
    throw ConfigError(str("--min-ranks is ", restarts.min_ranks, "; allowed: 1 to the number of ranks, ",
                          options.num_ranks));
  if (restarts.fits && !restarts.fits(options.num_ranks))
    throw ConfigError(str("the program can't run on ", options.num_ranks, " ranks"));
  std::random_device source;
  return Launcher(options, str("titan-", ::getpid(), "-", source(), "-", source())).run();
}

}  // namespace titan::cli
