#include "guard/heartbeat.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <future>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dist/flight_record.h"
#include "guard/flight_report.h"
#include "guard/mail.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/guard/watchdog.h"

namespace titan::dist {

namespace {

constexpr auto kLookForRequests = std::chrono::milliseconds(500);

struct WantedDump {
  std::string reason;
  FlightExtent extent;
};

}  // namespace

struct DumpThread::State {
  std::shared_ptr<FlightDump> dump;
  bool finds_requests = false;

  std::mutex mutex;
  std::condition_variable changed;
  std::optional<WantedDump> wanted;
  bool writes = false, request_found = false, stops = false, ended = false;

  void run() {
    std::unique_lock lock(mutex);
    while (!stops) {
      changed.wait_for(lock, kLookForRequests, [this] { return stops || wanted; });
      write_wanted(lock);
      if (finds_requests && !stops) find_request(lock);
    }
    ended = true;
    changed.notify_all();
  }

  void write_wanted(std::unique_lock<std::mutex>& lock) {
    while (wanted) {
      const WantedDump now = *std::exchange(wanted, std::nullopt);
      writes = true;
      lock.unlock();
      if (const int error = dump->write(now.reason.c_str(), now.extent))
        log::warning(str("can't write the flight record ", dump->path().string(), ": errno ", error));
      lock.lock();
      writes = false;
      changed.notify_all();
    }
  }

  // Of a folder that can't be read nothing is asked; it may be back later.
  void find_request(std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    std::error_code none;
    const bool found = std::filesystem::remove(dump->folder() / kFlightRequest, none);
    lock.lock();
    request_found = request_found || (found && !none);
  }
};

DumpThread::DumpThread(std::shared_ptr<FlightDump> dump, bool finds_requests)
    : state_(std::make_shared<State>()) {
  state_->dump = std::move(dump);
  state_->finds_requests = finds_requests;
  std::thread([state = state_] {
    pthread_setname_np(pthread_self(), "titan-dumps");
    state->run();
  }).detach();
}

DumpThread::~DumpThread() {
  std::unique_lock lock(state_->mutex);
  state_->stops = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, std::chrono::seconds(1), [this] { return state_->ended; });
}

void DumpThread::write(const std::string& reason, FlightExtent extent) {
  const std::lock_guard lock(state_->mutex);
  state_->wanted = {reason, extent};
  state_->changed.notify_all();
}

bool DumpThread::wait(std::chrono::milliseconds limit) {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, limit, [this] { return !state_->wanted && !state_->writes; });
}

bool DumpThread::take_request() {
  const std::lock_guard lock(state_->mutex);
  return std::exchange(state_->request_found, false);
}

namespace {

using std::chrono::milliseconds;

constexpr const char* kRequestsKey = "heartbeat/dump_requests";
constexpr const char* kReasonKey = "heartbeat/dump_reason";
constexpr const char* kFailuresKey = "heartbeat/failures";
constexpr const char* kVerdictKey = "heartbeat/verdict";
constexpr const char* kVerdictsReadKey = "heartbeat/verdicts_read";
constexpr const char* kEnded = "ended";
const std::string kFailureOf = "failure of ";

constexpr auto kEndLimit = std::chrono::seconds(2);
constexpr auto kVerdictLimit = std::chrono::seconds(6);
constexpr auto kWriteLimit = std::chrono::seconds(1);
// For what follows when the records are read: it is done in half the time of that.
constexpr auto kJoinLimit = std::chrono::seconds(1);
constexpr auto kReadLimit = std::chrono::seconds(1);
static_assert(kWriteLimit + kVerdictLimit + kReadLimit <= kExplainsWithin);

/// A store of thousands of ranks is asked half as often; no seldomer, as a lost rank has to be told in time.
milliseconds period_of(int num_ranks) { return milliseconds(std::clamp(num_ranks, 500, 1000)); }

std::string sign_key(int rank) { return str("heartbeat/rank_", rank); }

std::string text_in(c10d::Store& store, const std::string& key) {
  const std::vector<uint8_t> bytes = store.get(key);
  return {bytes.begin(), bytes.end()};
}

void put_text(c10d::Store& store, const std::string& key, const std::string& text) {
  store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
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

/// What a rank's key holds: "<beats>\n<words about the rank>".
struct Sign {
  std::string beats;
  std::string words;
  explicit Sign(const std::string& text)
      : beats(text.substr(0, text.find('\n'))),
        words(text.find('\n') == std::string::npos ? "" : text.substr(text.find('\n') + 1)) {}
};

Sign read_sign(c10d::Store& store, int rank) {
  const std::string key = sign_key(rank);
  return Sign(store.check({key}) ? text_in(store, key) : "");
}

std::string host_name_here() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

}  // namespace

class Heartbeat::Impl {
 public:
  Impl(const World& world, std::shared_ptr<FlightDump> dump)
      : rank_(world.rank()),
        size_(world.size()),
        recorder_(world.shared_recorder()),
        folder_(dump ? dump->folder() : ""),
        // Its own connection: a wait in the job's, for a rank that is late, must not look like death.
        store_(world.store().clone()),
        period_(period_of(world.size())),
        num_requests_(store_->add(kRequestsKey, 0)) {
    if (dump) dumps_ = std::make_unique<DumpThread>(std::move(dump), /*finds_requests=*/rank_ == 0);
  }

  void run();
  /// False: the thread hangs in the store.
  bool end();
  std::string explain(const std::string& failure);
  std::string explain_without_store(const std::string& failure, const char* what_is_known) const;

 private:
  using Clock = std::chrono::steady_clock;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;

  void exchange();
  void beat();
  void look_at_requests();
  void keep_first_rank();
  std::string sign_text() const;
  StorePtr store() const;
  std::string verdict(c10d::Store& store, const std::string& failure) const;
  std::string lost_ranks(c10d::Store& store) const;
  std::string wait_for_verdict(c10d::Store& store) const;
  void let_others_read(c10d::Store& store) const;

  const int rank_, size_;
  std::shared_ptr<FlightRecorder> recorder_;
  const std::filesystem::path folder_;  // of the records; "": none are kept
  StorePtr store_;                      // replaced by the thread alone, under the lock
  std::chrono::milliseconds period_;
  std::string host_ = host_name_here();
  uint64_t num_beats_ = 0;
  std::atomic<bool> failure_recorded_{false};
  int64_t num_requests_;
  std::unique_ptr<DumpThread> dumps_;  // null: no records are kept

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable wake_;
  bool ends_ = false, ended_ = false;
  std::string first_rank_sign_;
};

Heartbeat::Heartbeat(const World& world, std::shared_ptr<FlightDump> dump)
    : impl_(std::make_shared<Impl>(world, std::move(dump))), thread_([impl = impl_] { impl->run(); }) {}

Heartbeat::~Heartbeat() { impl_->end() ? thread_.join() : thread_.detach(); }

// Where rank 0 is stopped, its store neither answers nor refuses.
std::string Heartbeat::explain(const std::string& failure) noexcept {
  try {
    std::promise<std::string> promise;
    std::future<std::string> text = promise.get_future();
    std::thread([impl = impl_, failure, promise = std::move(promise)]() mutable {
      promise.set_value(impl->explain(failure));
    }).detach();
    if (text.wait_for(kExplainsWithin) == std::future_status::ready) return text.get();
    return impl_->explain_without_store(failure,
                                        "no rank is known to be lost: within 8 s neither the job's store, "
                                        "which rank 0 or its launcher keeps, "
                                        "nor the ranks' records told why");
  } catch (const std::exception&) {
    return failure;
  }
}

// A connection that breaks isn't a rank that is lost: another one is made, for as long as the store is there.
void Heartbeat::Impl::run() {
  pthread_setname_np(pthread_self(), "titan-signs");
  bool is_connected = true;
  std::unique_lock lock(mutex_);
  while (!ends_) {
    lock.unlock();
    StorePtr store = is_connected ? store_ : connect_again(*store_);
    lock.lock();
    if (store) store_ = std::move(store);
    lock.unlock();
    try {
      exchange();
      is_connected = true;
    } catch (const std::exception&) {
      is_connected = false;  // where the store is gone the training thread meets the same, and explains it
    }
    lock.lock();
    wake_.wait_for(lock, period_, [this] { return ends_; });
  }
  lock.unlock();
  try {
    if (is_connected) put_text(*store_, sign_key(rank_), kEnded);
  } catch (const std::exception&) {
    // The store is gone, and with it whoever would ask.
  }
  lock.lock();
  ended_ = true;
  wake_.notify_all();
}

void Heartbeat::Impl::exchange() {
  beat();
  look_at_requests();
  keep_first_rank();
}

bool Heartbeat::Impl::end() {
  std::unique_lock lock(mutex_);
  ends_ = true;
  wake_.notify_all();
  return wake_.wait_for(lock, kEndLimit, [this] { return ended_; });
}

void Heartbeat::Impl::beat() {
  ++num_beats_;
  put_text(*store_, sign_key(rank_), str(num_beats_, "\n", sign_text()));
}

std::string Heartbeat::Impl::sign_text() const {
  std::string text =
      str("rank ", rank_, " (host ", host_, ", pid ", getpid(), "), last heard of at ", time_of_day());
  const Activity activity = recorder_->activity();
  if (*activity.name) text += str(" at ", activity.name, " of step ", activity.step);
  CallRecord call;
  const uint64_t next = recorder_->num_calls();
  if (next == 0 || !recorder_->read(next - 1, call)) return text + ", before its first recorded call";
  return text + str(", its last call being ", call.describe(), ", ", name_of(call.state));
}

void Heartbeat::Impl::look_at_requests() {
  if (!dumps_) return;
  if (dumps_->take_request()) {
    put_text(*store_, kReasonKey, "request");
    store_->add(kRequestsKey, 1);
  }
  const int64_t requests = store_->add(kRequestsKey, 0);
  if (requests == num_requests_) return;
  num_requests_ = requests;
  if (failure_recorded_) return;
  const std::string reason = text_in(*store_, kReasonKey);
  failure_recorded_ = reason.starts_with(kFailureOf);
  dumps_->write(reason, failure_recorded_ ? FlightExtent::Last : FlightExtent::All);
}

// Its store goes with it, so what it said is kept here.
void Heartbeat::Impl::keep_first_rank() {
  if (rank_ == 0 || !store_->check({sign_key(0)})) return;
  const std::string text = text_in(*store_, sign_key(0));
  std::lock_guard lock(mutex_);
  first_rank_sign_ = text;
}

Heartbeat::Impl::StorePtr Heartbeat::Impl::store() const {
  std::lock_guard lock(mutex_);
  return store_;
}

std::string Heartbeat::Impl::explain(const std::string& failure) {
  try {
    const std::string mine = str("rank ", rank_, ": ", on_one_line(failure));
    // What was so when the first rank failed tells more than what its failure led to.
    if (dumps_ && !failure_recorded_) {
      dumps_->write(on_one_line(failure), FlightExtent::Last);
      dumps_->wait(kWriteLimit);
    }
    const StorePtr kept = store();
    c10d::Store& store = *kept;
    if (store.add(kFailuresKey, 1) > 1) return wait_for_verdict(store);
    put_text(store, kReasonKey, on_one_line(kFailureOf + mine));
    store.add(kRequestsKey, 1);
    const std::string text = verdict(store, mine);
    put_text(store, kVerdictKey, text);
    if (rank_ == 0) let_others_read(store);
    return text;
  } catch (const std::exception&) {
    return explain_without_store(
        failure, "the job's store is gone, and with it the process that keeps it, rank 0 or its launcher");
  }
}

std::string Heartbeat::Impl::explain_without_store(const std::string& failure,
                                                   const char* what_is_known) const {
  std::lock_guard lock(mutex_);
  const std::string words = Sign(first_rank_sign_).words;
  return str(what_is_known, words.empty() ? "" : ": " + words, "; this is rank ", rank_, ": ",
             on_one_line(failure));
}

// No rank is lost: then those without a record live, and have left theirs elsewhere.
std::string Heartbeat::Impl::verdict(c10d::Store& store, const std::string& failure) const {
  const auto end = Clock::now() + kVerdictLimit;
  std::string text = size_ > 1 ? lost_ranks(store) : "";
  if (text.empty() && dumps_ && size_ > 1)
    text = flight_summary(folder_, {.all_ranks_live = true, .end = end - kJoinLimit});
  return str(text, text.empty() ? "" : "; ", "first to fail was ", failure);
}

// The ranks whose number of beats stands still while three more are due.
std::string Heartbeat::Impl::lost_ranks(c10d::Store& store) const {
  std::vector<Sign> before;
  for (int rank = 0; rank < size_; ++rank) before.push_back(read_sign(store, rank));
  std::this_thread::sleep_for(7 * period_ / 2);
  std::string text;
  int count = 0;
  for (int rank = 0; rank < size_; ++rank) {
    const Sign& sign = before[static_cast<size_t>(rank)];
    if (rank == rank_ || sign.beats == kEnded || sign.beats != read_sign(store, rank).beats) continue;
    if (++count > 4) continue;
    text += str(text.empty() ? "lost: " : "; ",
                sign.words.empty() ? str("rank ", rank, ", which was never heard of") : sign.words);
  }
  return count > 4 ? str(text, " and ", count - 4, " ranks more") : text;
}

std::string Heartbeat::Impl::wait_for_verdict(c10d::Store& store) const {
  const auto end = Clock::now() + kVerdictLimit;
  while (!store.check({kVerdictKey})) {
    if (Clock::now() > end)
      return str("the rank that failed first didn't find out why within ", kVerdictLimit.count(), " s");
    std::this_thread::sleep_for(milliseconds(20));
  }
  const std::string text = text_in(store, kVerdictKey);
  store.add(kVerdictsReadKey, 1);
  if (rank_ == 0) let_others_read(store);
  return text;
}

// Rank 0's process may keep the store, and is about to end.
void Heartbeat::Impl::let_others_read(c10d::Store& store) const {
  const auto end = Clock::now() + kReadLimit;
  while (Clock::now() < end && store.add(kVerdictsReadKey, 0) + 1 < size_)
    std::this_thread::sleep_for(milliseconds(20));
}

}  // namespace titan::dist
