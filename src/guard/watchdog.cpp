#include "titan/guard/watchdog.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "core/process.h"
#include "core/threads.h"
#include "dist/device_backend.h"
#include "dist/flight_record.h"
#include "guard/flight_dump.h"
#include "guard/hang_report.h"
#include "guard/life_lines.h"
#include "guard/mail.h"
#include "guard/progress.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::dist {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Time for this rank's files, then for those of all ranks: the first rank to end may end the others with it.
constexpr auto kFilesWithin = 2s;
constexpr auto kAllFilesWithin = 3s;

constexpr auto kLookForRequests = 500ms;

// Once a rank is lost, the others' calls fail, or are ended here, so they explain the failure. A rank that
// doesn't get that far is ended after this time. When a host is gone, which alone takes 6 s to notice, calls
// over sockets wait for its answers, so little is gained by waiting.
constexpr auto kFailsWithin = 4s;
constexpr auto kFailsWithoutHostWithin = 1s;

// Longest time from a verdict until the other ranks learn of it.
milliseconds verdict_interval(int size) { return milliseconds(std::clamp(size, 250, 1000)); }

std::string pid_numbering() {
  char space[64] = "";
  static_cast<void>(!readlink("/proc/self/ns/pid", space, sizeof(space) - 1));
  return boot_id() + space;
}

std::string process_state(const Beat& other, const Beat& mine) {
  if (other.pids != mine.pids) return "";
  const std::string state = status_field(std::to_string(other.pid), "State");
  if (state.empty()) return "gone";
  if (state.starts_with("T")) return "stopped by a signal";
  if (state.starts_with("t")) return "stopped by a debugger";
  if (state.starts_with("Z")) return "dead";
  return "alive (state " + state + ")";
}

std::string time_of_day() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  tm parts{};
  localtime_r(&now.tv_sec, &parts);
  char text[40];
  std::snprintf(text, sizeof text, "%02d:%02d:%02d.%01ld", parts.tm_hour, parts.tm_min, parts.tm_sec,
                now.tv_nsec / 100'000'000);
  return text;
}

std::string on_one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

/// Data that the side threads leave for the watchdog thread. It is shared, because they may outlive the
/// watchdog.
class Desk {
 public:
  explicit Desk(int num_ranks) { inbox_.beats.resize(static_cast<size_t>(num_ranks)); }

  void leave_mail(const Mail::Inbox& inbox) {
    bool is_news = false;
    {
      const std::lock_guard lock(mutex_);
      is_news = inbox.verdict.has_value() || inbox.num_written != inbox_.num_written ||
                inbox.num_record_requests != inbox_.num_record_requests;
      inbox_ = inbox;
    }
    if (is_news) wake();
  }
  Mail::Inbox inbox() const {
    const std::lock_guard lock(mutex_);
    return inbox_;
  }

  void request_record() {
    record_is_requested_ = true;
    wake();
  }
  bool take_record_request() { return record_is_requested_.exchange(false); }

  void wake() {
    {
      const std::lock_guard lock(mutex_);
      is_woken_ = true;
    }
    woken_.notify_all();
  }
  void sleep(milliseconds limit) {
    std::unique_lock lock(mutex_);
    woken_.wait_for(lock, limit, [this] { return is_woken_; });
    is_woken_ = false;
  }

  std::atomic<bool> failure_is_recorded{false};

 private:
  mutable std::mutex mutex_;
  std::condition_variable woken_;
  bool is_woken_ = false;
  Mail::Inbox inbox_;
  std::atomic<bool> record_is_requested_{false};
};

// Makes a separate connection, because a call of the training thread that waits for a key blocks all others
// on the same connection. Uses separate keys, because a process may have several watchdogs, one after the
// other.
Mail::Connect connector(const World& world) {
  const std::string prefix = str("watchdog/", world.store().add(str("watchdog/", world.rank()), 1));
  // Captures the store, not the World: a hung thread would keep the World alive.
  auto job = StorePtr::reclaim_copy(&world.store());
  return [job, prefix]() -> StorePtr {
    auto store = connect_again(*job);
    if (!store) return {};
    return c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store));
  };
}

// Only rank 0 looks for a request, and passes it on to all ranks.
SideThread::Task request_finder(const World& world, const std::shared_ptr<FlightDump>& records,
                                const std::shared_ptr<Desk>& desk) {
  if (!records || world.rank() != 0) return {};
  return [file = records->folder() / kFlightRequest, desk] {
    std::error_code error;  // a folder that can't be read may come back later
    if (std::filesystem::remove(file, error) && !error) desk->request_record();
  };
}

std::shared_ptr<FlightDump> make_records(const World& world, const WatchdogOptions& options) {
  if (!options.record_prefix) return nullptr;
  return std::make_shared<FlightDump>(world.shared_recorder(),
                                      FlightDump::Options{.folder = options.folder,
                                                          .prefix = *options.record_prefix,
                                                          .rank = world.rank(),
                                                          .world_size = world.size(),
                                                          .on_signals = true});
}

}  // namespace

const char* name_of(ProgressKind kind) {
  static constexpr std::array names = {"idle", "data", "compute", "checkpoint", "validation"};
  return names[static_cast<size_t>(kind)];
}

const TimeLimit& WatchdogLimits::of(ProgressKind kind) const {
  static const TimeLimit none;
  const std::array limits = {&none, &data, &compute, &checkpoint, &validation};
  return *limits[static_cast<size_t>(kind)];
}

class Watchdog::Impl {
 public:
  Impl(const World& world, WatchdogOptions options)
      : world_(world),
        connect_(connector(world)),
        options_(std::move(options)),
        records_(make_records(world, options_)),
        progress_(world.recorder(), options_.computing_is_progress),
        silences_(static_cast<size_t>(world.size())),
        last_numbers_(static_cast<size_t>(world.size()), -1),
        lines_(connect_, world.rank(), world.size()),
        mail_(std::make_shared<Mail>(connect_, world.rank(), world.size())),
        store_thread_("titan-beats"),
        file_thread_("titan-records", request_finder(world, records_, desk_), kLookForRequests) {
    outbox_.beat.pid = getpid();
    outbox_.beat.host = host_name();
    outbox_.beat.pids = pid_numbering();
    if (options_.judges) begin_judging();
    thread_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "titan-watchdog");
      run();
    });
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
    }
    desk_->wake();
    thread_.join();
    state_ = RunState::Ended;
    outbox_.beat = beat_now();
    store_thread_.post([mail = mail_, outbox = outbox_] { mail->exchange(outbox, /*everything=*/true); });
  }

  ProgressCell& cell() { return progress_.cell(); }

  void set_limits(const WatchdogLimits& limits) {
    {
      const std::lock_guard lock(mutex_);
      options_.limits = limits;
      begin_judging();
      next_beat_ = {};
    }
    desk_->wake();
  }

  void leave() {
    {
      const std::lock_guard lock(mutex_);
      state_ = RunState::Left;
      next_beat_ = {};
    }
    desk_->wake();
  }

  Explanation explain(const std::string& failure) {
    explains_ = true;
    leave();
    const Mail::Inbox inbox = desk_->inbox();
    FailureScene scene{.rank = world_.rank(),
                       .size = world_.size(),
                       .failure = on_one_line(failure),
                       .is_about_peer = is_cut_off_ || is_error_of_call(failure, world_.recorder()),
                       .connect = connect_,
                       .records = records_ ? records_->folder() : "",
                       .record_request = inbox.record_request,
                       .first_rank_last_words = ""};
    if (scene.rank != 0 && inbox.beats[0]) scene.first_rank_last_words = inbox.beats[0]->life;
    // The state when the first rank failed says more than the state after the failures that followed.
    if (records_ && !desk_->failure_is_recorded) {
      write_record(scene.failure, FlightExtent::Last);
      file_thread_.wait(kRecordWithin);
    }
    // Whatever errors say once a host is gone, that is the cause; the store may be gone with it. The rank that told the others could still
    // ask the store which ranks the host had.
    const auto loss = lines_.loss();
    const bool was_told = inbox.record_request.starts_with(kHostIsGone);
    if (was_told || (loss && loss->is_host)) {
      const std::string cause =
          was_told ? inbox.record_request : str(kFailureOf, kTheJob, ": ", text_of(*loss));
      if (scene.rank == 0) keep_store_while_others_read(cause);
      return {cause.substr(cause.find(": ") + 2), -1, true, true};
    }
    const auto found = std::make_shared<Explanation>();
    const auto explain_it = [scene, found] {
      const BackgroundCalls background;
      *found = explain_failure(scene);
    };
    if (!within(kFindsCauseWithin, explain_it))
      return explain_alone(
          scene,
          str("no rank is known to be lost: within ",
              std::chrono::duration<double>(kFindsCauseWithin).count(),
              " s neither the job's store, which rank 0 or its launcher keeps, nor the ranks' records say "
              "why"));
    if (found->told_by >= 0 && found->told_by != scene.rank) std::this_thread::sleep_for(kCulpritsFirst);
    return *found;
  }

 private:
  void begin_judging() {
    if (std::exchange(state_, RunState::Runs) != RunState::NotBegun) return;
    prepare_thread_stacks();
    // Stacks of an earlier start would look like this start's.
    std::error_code none;
    if (!options_.folder.empty()) std::filesystem::remove(stacks_path(options_.folder, world_.rank()), none);
  }

  // The store may end with this process, rank 0's.
  void keep_store_while_others_read(const std::string& cause) {
    within(kRecordWithin, [connect = connect_, cause] {
      try {
        if (const StorePtr store = connect()) request_records(*store, cause);
      } catch (const std::exception&) {
        // It is lost as well, so nobody can read it.
      }
    });
    std::this_thread::sleep_for(2 * verdict_interval(world_.size()));
  }

  void write_record(const std::string& reason, FlightExtent extent) {
    file_thread_.post([records = records_, reason, extent] {
      if (const int error = records->write(reason.c_str(), extent))
        log::warning(str("cannot write the flight record ", records->path().string(), ": errno ", error));
    });
  }

  // Used by the watchdog thread, under mutex_.

  void run() {
    milliseconds pause{0};
    while (true) {
      desk_->sleep(std::min(pause, verdict_interval(world_.size())));
      std::unique_lock lock(mutex_);
      pause = beat_interval();
      if (stops_) return;
      const auto verdict = turn();
      if (!verdict) continue;
      lock.unlock();
      return end(*verdict);
    }
  }

  std::optional<Verdict> turn() {
    const auto now = Clock::now();
    inbox_ = desk_->inbox();
    serve_record_requests();
    look_for_losses(now);
    const bool beats = now >= next_beat_;
    if (beats) {
      next_beat_ = now + beat_interval();
      look();
    }
    std::optional<Verdict> verdict;
    if (state_ != RunState::Left) verdict = inbox_.verdict;
    if (!verdict && beats && state_ == RunState::Runs) verdict = outbox_.verdict = find_verdict();
    if (!verdict && state_ == RunState::Runs && lost_since_ && now - *lost_since_ > fails_within() &&
        !explains_)
      verdict = outbox_.verdict = verdict_on(*lines_.loss());
    exchange(beats || verdict);
    return verdict;
  }

  // Rank 0 receives no beats while its own connection is broken. For another rank, a connection that can't be
  // restored may mean that rank 0's process, which keeps the store, is gone.
  void look() {
    const auto longest_gap = patience() * 4;
    progress_.look(longest_gap);
    outbox_.beat = beat_now();
    const auto now = Clock::now();
    const bool is_cut_off = world_.rank() == 0 && !inbox_.is_connected;
    for (size_t rank = 0; rank < inbox_.beats.size(); ++rank) {
      const auto& beat = inbox_.beats[rank];
      if (!beat) {
        // Without a beat of rank 0, this rank waits as long as for a silent one before it judges.
        if (rank == 0 && world_.rank() != 0) silences_[0].look(now, /*moved=*/false, longest_gap);
        continue;
      }
      const bool is_new = std::exchange(last_numbers_[rank], beat->number) != beat->number;
      silences_[rank].look(now, is_new || is_cut_off, longest_gap);
    }
  }

  // One exchange at a time. A store that hangs blocks its thread, and then nothing is sent.
  void exchange(bool everything) {
    const auto now = Clock::now();
    if (!everything && now < next_exchange_) return;
    if (!store_thread_.is_idle() && !outbox_.verdict) {
      if (everything) next_beat_ = {};
      return;
    }
    next_exchange_ = now + verdict_interval(world_.size());
    store_thread_.post([mail = mail_, desk = desk_, outbox = outbox_, everything] {
      desk->leave_mail(mail->exchange(outbox, everything));
    });
    outbox_.record_request.clear();
  }

  void serve_record_requests() {
    if (records_ && desk_->take_record_request()) {
      outbox_.record_request = "request";
      next_beat_ = {};
    }
    if (inbox_.num_record_requests == num_served_requests_) return;
    num_served_requests_ = inbox_.num_record_requests;
    const bool is_failure = inbox_.record_request.starts_with(kFailureOf);
    if (records_ && !desk_->failure_is_recorded) {
      desk_->failure_is_recorded = is_failure;
      write_record(inbox_.record_request, is_failure ? FlightExtent::Last : FlightExtent::All);
    }
    if (!is_failure) return;
    failure_is_known_ = true;
    release_device_calls();
  }

  // The first rank to notice a loss tells the others.
  void look_for_losses(Clock::time_point now) {
    if (lost_since_ || state_ == RunState::Left) return;
    const auto loss = lines_.loss();
    if (!loss) return;
    lost_since_ = now;
    if (!failure_is_known_)
      outbox_.record_request =
          str(kFailureOf, loss->is_host ? kTheJob : str("rank ", loss->ranks.front()), ": ", text_of(*loss));
    next_beat_ = {};
    // The store may be gone, too.
    if (!inbox_.is_connected || loss->is_host || loss->ranks.front() == 0) release_device_calls();
  }

  milliseconds fails_within() const {
    return lines_.loss()->is_host ? kFailsWithoutHostWithin : kFailsWithin;
  }

  // Begins with "host " if one is gone.
  std::string text_of(const LifeLines::Loss& loss) const {
    const std::string ranks =
        str(loss.ranks.size() > 1 ? "ranks " : "rank ", list_str(loss.ranks), " of ", world_.size());
    return loss.is_host ? str(loss.how, ", and with it ", ranks) : str(ranks, " is lost: ", loss.how);
  }
  Verdict verdict_on(const LifeLines::Loss& loss) const { return {text_of(loss), loss.ranks, loss.ranks}; }

  // NCCL never learns that a peer is lost: calls would wait for it forever. The host then continues with
  // whatever is in its results, until its next call throws: so an error after a call that was cut off is about
  // the peer.
  void release_device_calls() {
    DeviceBackend* const devices = device_backend();
    if (!devices || std::exchange(is_released_, true)) return;
    is_cut_off_ = !open_call(world_.recorder(), ProgressKind::Compute).empty();
    file_thread_.wait(kRecordWithin);  // the record shows the calls as they were
    within(0ms, [devices] { devices->abort_groups(); });
  }

  Beat beat_now() {
    Beat beat = outbox_.beat;
    ++beat.number;
    beat.state = state_;
    beat.kind = progress_.reading().kind;
    beat.what = progress_.reading().what;
    beat.step = progress_.reading().step;
    beat.stalled_ms = progress_.stalled(options_.limits).count();
    beat.computes = progress_.computes_in_vain(options_.limits);
    const TimeLimit& limit = options_.limits.of(beat.kind);
    beat.limit_ms = limit.time.count();
    beat.setting = limit.setting;
    beat.silence_limit_ms = options_.limits.compute.time.count();
    beat.silence_setting = options_.limits.compute.setting;
    // Reading the ring is worth its cost only for a rank that stands still.
    const bool stands_still = beat.stalled_ms > patience().count();
    beat.call = stands_still ? open_call(world_.recorder(), beat.kind) : "";
    const std::string tracer = status_field("self", "TracerPid");
    beat.traced = !tracer.empty() && tracer != "0";
    beat.life = last_words();
    return beat;
  }

  std::string last_words() const {
    std::string text = str("rank ", world_.rank(), " (host ", outbox_.beat.host, ", pid ", outbox_.beat.pid,
                           "), last heard from at ", time_of_day());
    const Activity activity = world_.recorder().activity();
    if (*activity.name) text += str(" in ", activity.name, " of step ", activity.step);
    CallRecord call;
    const uint64_t num_calls = world_.recorder().num_calls();
    if (num_calls == 0 || !world_.recorder().read(num_calls - 1, call))
      return text + ", before its first recorded call";
    return text + str(", its last call being ", call.describe(), ", ", name_of(call.state));
  }

  RankView view_of(int rank) const {
    if (rank == world_.rank()) return {rank, outbox_.beat, 0, ""};
    const auto i = static_cast<size_t>(rank);
    RankView view{rank, inbox_.beats[i], silences_[i].stalled().count(), ""};
    if (!view.beat) return view;
    // This rank notices the silence, so its own limit applies. The other may have sent the limit of its first
    // step.
    view.beat->silence_limit_ms = outbox_.beat.silence_limit_ms;
    view.beat->silence_setting = outbox_.beat.silence_setting;
    // Other ranks' waits may end the job before the silence alone would.
    if (2 * view.silent_ms > view.beat->silence_limit_ms) {
      view.process = process_state(*view.beat, outbox_.beat);
      view.beat->traced = view.beat->traced || view.process == "stopped by a debugger";
    }
    return view;
  }

  // Rank 0 judges all ranks. If it doesn't, another rank judges rank 0 and itself.
  std::vector<RankView> views() const {
    if (world_.rank() == 0) {
      std::vector<RankView> all;
      for (int rank = 0; rank < world_.size(); ++rank) all.push_back(view_of(rank));
      return all;
    }
    RankView rank0 = view_of(0);
    const bool rank0_judges = (!rank0.beat || rank0.beat->state == RunState::Runs) &&
                              rank0.silent_ms <= outbox_.beat.silence_limit_ms;
    if (rank0_judges) return {};
    return {std::move(rank0), view_of(world_.rank())};
  }

  std::optional<Verdict> find_verdict() {
    std::vector<RankView> ranks = views();
    const auto now = Clock::now();
    const int64_t interval_ms = patience().count();
    if (has_excuse(ranks, interval_ms)) last_excuse_ = now;
    for (RankView& view : ranks)
      view.unexcused_ms = std::chrono::duration_cast<milliseconds>(now - last_excuse_).count();
    return judge(ranks, world_.size(), interval_ms);
  }

  void end(const Verdict& verdict) {
    if (options_.on_hang) return options_.on_hang(verdict.text);
    end_process_after(kHangEndsWithin);  // even if one of the following blocks
    // A call that fails because the culprit ends doesn't replace the record.
    desk_->failure_is_recorded = true;
    log::error("the job hangs: " + verdict.text);
    const int rank = world_.rank();
    const std::string report = hang_report(rank, outbox_.beat, world_.recorder());
    log::error("the job hangs: " + report);
    leave_files({rank, report, options_.folder, records_, verdict.text}, file_thread_, kFilesWithin);
    const auto is_among = [](int one, const std::vector<int>& ranks) {
      return std::find(ranks.begin(), ranks.end(), one) != ranks.end();
    };
    meet_at_end(static_cast<size_t>(world_.size()) - verdict.silent.size(),
                is_among(0, verdict.silent) ? 1s : kAllFilesWithin);
    // Repeated at the end, for readers of a job's last lines.
    log::error("the job hangs: " + verdict.text);
    // Culprits that no longer respond don't end by themselves.
    const bool culprits_end = std::ranges::any_of(
        verdict.culprits, [&](int culprit) { return !is_among(culprit, verdict.silent); });
    if (culprits_end && !is_among(rank, verdict.culprits)) std::this_thread::sleep_for(kCulpritsFirst);
    std::_Exit(kHungExitCode);
  }

  // Waits until this many ranks have written their files, or until the store is gone.
  void meet_at_end(size_t num_ranks, milliseconds limit) {
    const auto end = Clock::now() + limit;
    outbox_.has_written = true;
    while (Clock::now() < end && static_cast<size_t>(desk_->inbox().num_written) < num_ranks &&
           desk_->inbox().is_connected) {
      exchange(/*everything=*/true);
      desk_->sleep(50ms);
    }
  }

  // The time between two beats, derived from the limits alone. It determines how old a beat may be before its
  // rank counts as silent.
  milliseconds patience() const {
    const WatchdogLimits& limits = options_.limits;
    const auto shortest =
        std::min({limits.data.time, limits.compute.time, limits.checkpoint.time, limits.validation.time});
    return std::clamp<milliseconds>(shortest / 10, 50ms, 2000ms);
  }
  milliseconds beat_interval() const { return std::min(patience(), slowest_beat(world_.size())); }

  const World world_;
  const Mail::Connect connect_;
  WatchdogOptions options_;
  std::shared_ptr<FlightDump> records_;  // null: none are written
  OwnProgress progress_;

  mutable std::mutex mutex_;  // guards the members below, which the watchdog thread uses
  bool stops_ = false;
  RunState state_ = RunState::NotBegun;
  Mail::Outbox outbox_;
  Mail::Inbox inbox_;
  int64_t num_served_requests_ = 0;
  std::vector<StallClock> silences_;   // by rank, since its last beat
  std::vector<int64_t> last_numbers_;  // those beats' numbers
  Clock::time_point last_excuse_{};    // when a rank with an excuse was last seen
  Clock::time_point next_beat_{}, next_exchange_{};

  const std::shared_ptr<Desk> desk_ = std::make_shared<Desk>(world_.size());
  LifeLines lines_;  // closed after the last beat is sent
  std::optional<Clock::time_point> lost_since_;
  std::atomic<bool> explains_{false};
  bool failure_is_known_ = false, is_released_ = false;
  std::atomic<bool> is_cut_off_{false};  // it was released from a call
  const std::shared_ptr<Mail> mail_;
  SideThread store_thread_, file_thread_;
  std::thread thread_;
};

Watchdog::Watchdog(const World& world, WatchdogOptions options) {
  if (world.backend() != "fake") impl_ = std::make_unique<Impl>(world, std::move(options));
}
Watchdog::~Watchdog() = default;

void Watchdog::progress(ProgressKind kind, const char* what, int64_t step) {
  if (impl_) impl_->cell().report(kind, what, step);
}
void Watchdog::progress() {
  if (impl_) impl_->cell().report();
}
void Watchdog::set_limits(const WatchdogLimits& limits) {
  if (impl_) impl_->set_limits(limits);
}
void Watchdog::leave() {
  if (impl_) impl_->leave();
}
Explanation Watchdog::explain(const std::string& failure) noexcept {
  try {
    if (impl_) return impl_->explain(failure);
  } catch (const std::exception&) {
    // The error itself is all that is known.
  }
  return {failure, -1, /*covers_own_error=*/true};
}

}  // namespace titan::dist
