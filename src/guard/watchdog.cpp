#include "titan/guard/watchdog.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "core/thread_stacks.h"
#include "dist/flight_record.h"
#include "guard/flight_dump.h"
#include "guard/hang_report.h"
#include "guard/mail.h"
#include "guard/verdict.h"
#include "titan/core/log.h"

namespace titan::dist {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// For this rank's files, and then for all ranks to come so far: the first to end may take the others with it.
constexpr auto kFilesWithin = 2s;
constexpr auto kWritesWithin = 3s;

// Launchers call the first rank to end the one that failed.
constexpr auto kCulpritsFirst = 1500ms;

// A rank whose processors did this much of the time what is to be done computes.
constexpr double kBusy = 0.2;
// An endless loop does so too: after this many limits without any other sign it is none any more.
constexpr int kBusyLimits = 10;

double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// What the kernel has fetched from storage for this process, or is to bring there: not what a cache had.
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

std::string process_field(const std::string& pid, const char* field) {
  std::ifstream file("/proc/" + pid + "/status");
  std::string name, value;
  while (file >> name) {
    std::getline(file >> std::ws, value);
    if (name == field) return value;
  }
  return "";
}

std::string own_host() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::string own_pids() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char space[64] = "";
  static_cast<void>(!readlink("/proc/self/ns/pid", space, sizeof(space) - 1));
  return boot + space;
}

std::string process_state(const Beat& other, const Beat& mine) {
  if (other.pids != mine.pids) return "";
  const std::string state = process_field(std::to_string(other.pid), "State:");
  if (state.empty()) return "gone";
  if (state.starts_with("T")) return "stopped by a signal";
  if (state.starts_with("t")) return "stopped by a debugger";
  if (state.starts_with("Z")) return "dead";
  return "there (state " + state + ")";
}

milliseconds shortest_of(const WatchdogLimits& limits) {
  return std::min({limits.data.time, limits.compute.time, limits.checkpoint.time, limits.validation.time});
}

milliseconds longest_of(const WatchdogLimits& limits) {
  return std::max({limits.data.time, limits.compute.time, limits.checkpoint.time, limits.validation.time});
}

milliseconds interval_of(const WatchdogLimits& limits) {
  return std::clamp<milliseconds>(shortest_of(limits) / 10, 50ms, 2000ms);
}

// Collectives of its peers wait for somewhat longer than the longest limit; the watchdog knows more.
milliseconds longest_computing(const WatchdogLimits& limits, ProgressKind kind) {
  const milliseconds limit = limits.of(kind).time;
  return std::max(limit, std::min(kBusyLimits * limit, longest_of(limits)));
}

}  // namespace

const TimeLimit& WatchdogLimits::of(ProgressKind kind) const {
  static const TimeLimit none;
  switch (kind) {
    case ProgressKind::Data:
      return data;
    case ProgressKind::Compute:
      return compute;
    case ProgressKind::Checkpoint:
      return checkpoint;
    case ProgressKind::Validation:
      return validation;
    case ProgressKind::Idle:
      break;
  }
  return none;
}

class Watchdog::Impl {
 public:
  Impl(const World& world, WatchdogOptions options);
  ~Impl();

  void progress(ProgressKind kind, const char* what, int64_t step) { at_.tell(kind, what, step); }
  void progress() { at_.tell(); }
  void set_limits(const WatchdogLimits& limits);

 private:
  /// What changes while a rank goes on.
  struct Signs {
    uint64_t progress = 0, calls = 0;
    int64_t waited_ns = 0;
    int64_t storage_mib = 0;
    friend bool operator==(const Signs&, const Signs&) = default;
  };

  void remove_old_stacks() const;
  void start_mail();
  milliseconds interval();
  void watch();
  bool gave_sign();
  bool is_busy(Clock::time_point now);
  milliseconds stalled() const;
  void look();
  void look_at_others();
  Beat beat_now();
  RankView view_of(int rank) const;
  std::vector<RankView> views() const;
  bool is_watched_by_rank0(const RankView& rank0) const;
  std::optional<Verdict> verdict();
  void end(const Verdict& verdict);
  milliseconds longest_gap() const { return interval_ * 4; }

  const World world_;
  WatchdogOptions options_;
  Beat mine_;
  std::shared_ptr<WatchdogMail> mail_;  // null: a world of one rank

  ProgressCell at_;

  // The watching thread's.
  Signs last_signs_;
  double last_processor_s_ = 0;
  Clock::time_point last_look_ = Clock::now();
  ProgressCell::Reading reading_ = at_.read();
  StallClock own_clock_;                               // of this rank's signs, computing among them
  StallClock signs_clock_;                             // without that
  std::chrono::steady_clock::time_point last_excuse_;  // when a rank was last seen for which others may wait
  std::vector<StallClock> clocks_;                     // of the others' beats
  std::vector<int64_t> last_numbers_;                  // of these
  std::vector<std::optional<Beat>> beats_;

  const std::shared_ptr<Bell> bell_ =
      std::make_shared<Bell>();  // rung for what changes below, and by the mail
  std::mutex mutex_;             // of the two below and the limits
  bool stops_ = false;
  milliseconds interval_;
  std::thread thread_;
};

Watchdog::Impl::Impl(const World& world, WatchdogOptions options)
    : world_(world),
      options_(std::move(options)),
      clocks_(static_cast<size_t>(world.size())),
      last_numbers_(static_cast<size_t>(world.size()), -1),
      beats_(static_cast<size_t>(world.size())),
      interval_(interval_of(options_.limits)) {
  mine_.pid = getpid();
  mine_.host = own_host();
  mine_.pids = own_pids();
  prepare_thread_stacks();
  remove_old_stacks();
  if (world_.size() > 1) start_mail();
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "titan-watchdog");
    watch();
  });
}

Watchdog::Impl::~Impl() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  bell_->ring();
  thread_.join();
  if (mail_) mail_->stop(beat_now());
}

// An earlier start's would be taken for this one's.
void Watchdog::Impl::remove_old_stacks() const {
  std::error_code none;
  if (!options_.folder.empty()) std::filesystem::remove(stacks_path(options_.folder, world_.rank()), none);
}

// A connection of its own: a call of the training thread that waits for a key holds up all others of its own.
void Watchdog::Impl::start_mail() {
  const std::string prefix = str("watchdog/", world_.store().add(str("watchdog/", world_.rank()), 1), "/");
  // Not the world: a thread that hangs here would keep it from its end.
  auto job = c10::intrusive_ptr<c10d::Store>::reclaim_copy(&world_.store());
  const auto connect = [job, prefix]() -> c10::intrusive_ptr<c10d::Store> {
    auto store = connect_again(*job);
    if (!store) return {};
    return c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store));
  };
  mail_ = std::make_shared<WatchdogMail>(connect, bell_, world_.rank(), world_.size());
  mail_->set_interval(interval_);
  mail_->post(beat_now());
  mail_->start();
}

void Watchdog::Impl::set_limits(const WatchdogLimits& limits) {
  {
    const std::lock_guard lock(mutex_);
    options_.limits = limits;
    interval_ = interval_of(limits);
    if (mail_) mail_->set_interval(interval_);
  }
  bell_->ring();
}

milliseconds Watchdog::Impl::interval() {
  const std::lock_guard lock(mutex_);
  return interval_;
}

void Watchdog::Impl::watch() {
  while (true) {
    bell_->wait(interval());
    std::unique_lock lock(mutex_);
    if (stops_) return;
    look();
    const auto found = verdict();
    if (!found) continue;
    lock.unlock();
    return end(*found);
  }
}

bool Watchdog::Impl::gave_sign() {
  reading_ = at_.read();
  const Signs signs{reading_.count, world_.recorder().num_calls(), world_.recorder().waited_ns(),
                    reads_or_writes(reading_.kind) ? storage_mib() : 0};
  return std::exchange(last_signs_, signs) != signs;
}

// The host of a GPU spins while it waits for that, but not while it reads data or files.
bool Watchdog::Impl::is_busy(Clock::time_point now) {
  const double processor_s = processor_seconds();
  const double elapsed_s = std::chrono::duration<double>(now - last_look_).count();
  const double worked_s = processor_s - std::exchange(last_processor_s_, processor_s);
  last_look_ = now;
  const bool counts = options_.computing_is_progress || reads_or_writes(reading_.kind);
  return counts && worked_s > kBusy * elapsed_s;
}

milliseconds Watchdog::Impl::stalled() const {
  const milliseconds without_sign = signs_clock_.stalled();
  const bool computes_for_ever = without_sign > longest_computing(options_.limits, reading_.kind);
  return computes_for_ever ? without_sign : milliseconds(own_clock_.stalled());
}

void Watchdog::Impl::look() {
  const auto now = Clock::now();
  const bool sign = gave_sign(), busy = is_busy(now);
  own_clock_.look(now, sign || busy, longest_gap());
  signs_clock_.look(now, sign, longest_gap());
  mine_ = beat_now();
  if (!mail_) return;
  mail_->post(mine_);
  look_at_others();
}

// Rank 0 hears nobody while its own connection is broken. Of another rank that can't be made again either,
// rank 0's process, which keeps the store, may be what is gone.
void Watchdog::Impl::look_at_others() {
  beats_ = mail_->beats();
  const auto now = Clock::now();
  const bool deaf = world_.rank() == 0 && !mail_->is_connected();
  for (size_t rank = 0; rank < beats_.size(); ++rank) {
    if (!beats_[rank]) continue;
    const bool is_new = std::exchange(last_numbers_[rank], beats_[rank]->number) != beats_[rank]->number;
    clocks_[rank].look(now, is_new || deaf, longest_gap());
  }
}

Beat Watchdog::Impl::beat_now() {
  Beat beat = mine_;
  ++beat.number;
  beat.kind = reading_.kind;
  beat.what = reading_.what;
  beat.step = reading_.step;
  beat.stalled_ms = stalled().count();
  beat.computes = beat.stalled_ms > own_clock_.stalled().count();
  const TimeLimit& limit = options_.limits.of(beat.kind);
  beat.limit_ms = limit.time.count();
  beat.setting = limit.setting;
  beat.silence_limit_ms = options_.limits.compute.time.count();
  beat.silence_setting = options_.limits.compute.setting;
  // Of interest, and worth a copy of the ring, where the rank stands still.
  const bool stands = beat.stalled_ms > interval_.count();
  beat.call = stands ? open_call(world_.recorder(), beat.kind) : "";
  const std::string tracer = process_field("self", "TracerPid:");
  beat.traced = !tracer.empty() && tracer != "0";
  return beat;
}

RankView Watchdog::Impl::view_of(int rank) const {
  if (rank == world_.rank()) return {rank, mine_, 0, ""};
  const auto i = static_cast<size_t>(rank);
  RankView view{rank, beats_[i], clocks_[i].stalled().count(), ""};
  if (view.beat) {
    // Silence is heard here, so by this rank's limit: the other may have told its first step's.
    view.beat->silence_limit_ms = mine_.silence_limit_ms;
    view.beat->silence_setting = mine_.silence_setting;
  }
  // Others' waits may end the job before the silence alone would.
  if (view.beat && 2 * view.silent_ms > view.beat->silence_limit_ms) {
    view.process = process_state(*view.beat, mine_);
    view.beat->traced = view.beat->traced || view.process == "stopped by a debugger";
  }
  return view;
}

bool Watchdog::Impl::is_watched_by_rank0(const RankView& rank0) const {
  return rank0.beat && !rank0.beat->left && rank0.silent_ms <= mine_.silence_limit_ms;
}

// Rank 0 sees all. Another rank judges where rank 0 doesn't: by itself, and of these two alone.
std::vector<RankView> Watchdog::Impl::views() const {
  std::vector<RankView> all;
  if (world_.rank() == 0) {
    for (int rank = 0; rank < world_.size(); ++rank) all.push_back(view_of(rank));
    return all;
  }
  RankView rank0 = view_of(0);
  if (is_watched_by_rank0(rank0)) return {};
  return {std::move(rank0), view_of(world_.rank())};
}

std::optional<Verdict> Watchdog::Impl::verdict() {
  if (mail_)
    if (auto known = mail_->verdict()) return known;
  std::vector<RankView> ranks = views();
  const auto now = std::chrono::steady_clock::now();
  if (has_excuse(ranks, interval_.count())) last_excuse_ = now;
  for (RankView& view : ranks)
    view.unexcused_ms = std::chrono::duration_cast<std::chrono::milliseconds>(now - last_excuse_).count();
  auto own = judge(ranks, world_.size(), interval_.count());
  if (own && mail_) mail_->condemn(*own);
  return own;
}

void Watchdog::Impl::end(const Verdict& verdict) {
  if (options_.on_hang) return options_.on_hang(verdict.text);
  end_process_after(kHangEndsWithin);  // whatever of the following stands still
  log::error("the job hangs: " + verdict.text);
  const std::string report = hang_report(world_.rank(), mine_, world_.recorder());
  log::error("the job hangs: " + report);
  leave_files(world_.rank(), report, options_.folder, options_.flight, verdict.text, kFilesWithin);
  const int num_alive = world_.size() - static_cast<int>(verdict.silent.size());
  const bool store_answers = std::count(verdict.silent.begin(), verdict.silent.end(), 0) == 0;
  if (mail_) mail_->meet_at_end(num_alive, store_answers ? kWritesWithin : 1s);
  // Last, for whoever reads only a job's last lines.
  log::error("the job hangs: " + verdict.text);
  const auto& culprits = verdict.culprits;
  if (std::count(culprits.begin(), culprits.end(), world_.rank()) == 0)
    std::this_thread::sleep_for(kCulpritsFirst);
  std::_Exit(kHungExitCode);
}

Watchdog::Watchdog(const World& world, WatchdogOptions options) {
  if (world.backend() != "fake") impl_ = std::make_unique<Impl>(world, std::move(options));
}
Watchdog::~Watchdog() = default;

void Watchdog::progress(ProgressKind kind, const char* what, int64_t step) {
  if (impl_) impl_->progress(kind, what, step);
}
void Watchdog::progress() {
  if (impl_) impl_->progress();
}
void Watchdog::set_limits(const WatchdogLimits& limits) {
  if (impl_) impl_->set_limits(limits);
}

}  // namespace titan::dist
