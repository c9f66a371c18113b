#include "guard/mail.h"

#include <netdb.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>
#include <algorithm>
#include <exception>
#include <numeric>
#include <string>
#include <thread>

#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "titan/core/log.h"

namespace titan::dist {

namespace {

bool takes_connection(const addrinfo& address) {
  const int fd = socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, address.ai_protocol);
  if (fd < 0) return false;
  const timeval limit{2, 0};  // Linux has connect() keep to it too
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  const bool taken = connect(fd, address.ai_addr, address.ai_addrlen) == 0;
  close(fd);
  return taken;
}

bool is_served(const std::string& host, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return false;
  bool taken = false;
  for (const auto* address = found; address && !taken; address = address->ai_next)
    taken = takes_connection(*address);
  freeaddrinfo(found);
  return taken;
}

// Of a prefix's store, which may have one too.
c10d::Store& served_store(c10d::Store& store) {
  auto* prefix = dynamic_cast<c10d::PrefixStore*>(&store);
  return prefix ? *prefix->getUnderlyingNonPrefixStore() : store;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> connect_again(c10d::Store& store) {
  try {
    const auto* server = dynamic_cast<const c10d::TCPStore*>(&served_store(store));
    if (server && !is_served(server->getHost(), server->getPort())) return {};
    return store.clone();
  } catch (const std::exception&) {
    return {};
  }
}

namespace {

constexpr const char* kHangVerdictKey = "verdict";
constexpr const char* kWrittenKey = "written";

// At most so much later than the first rank that knows it do the others learn of a verdict.
std::chrono::milliseconds verdict_interval(int num_ranks) {
  return std::chrono::milliseconds(std::clamp(num_ranks, 250, 1000));
}

constexpr auto kConnectAgain = std::chrono::seconds(1);

std::string beat_key(int rank) { return str("beat/", rank); }

std::string read_text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string to_text(const Verdict& verdict) {
  return nlohmann::json{{"text", verdict.text}, {"silent", verdict.silent}, {"culprits", verdict.culprits}}
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Verdict verdict_from(const std::string& text) {
  const auto json = nlohmann::json::parse(text);
  return {json.at("text").get<std::string>(), json.at("silent").get<std::vector<int>>(),
          json.at("culprits").get<std::vector<int>>()};
}

}  // namespace

WatchdogMail::WatchdogMail(Connect connect, std::shared_ptr<Bell> bell, int rank, int size)
    : connect_(std::move(connect)),
      bell_(std::move(bell)),
      rank_(rank),
      size_(size),
      beats_(static_cast<size_t>(size)) {
  missing_.resize(rank == 0 ? static_cast<size_t>(size) : 1);
  std::iota(missing_.begin(), missing_.end(), 0);
}

void WatchdogMail::start() {
  std::thread([self = shared_from_this()] {
    pthread_setname_np(pthread_self(), "titan-beats");
    self->run();
  }).detach();
}

void WatchdogMail::stop(Beat last) {
  std::unique_lock lock(mutex_);
  last.left = true;
  mine_ = std::move(last);
  stops_ = wakes_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, std::chrono::seconds(1), [this] { return ended_; });
}

void WatchdogMail::set_interval(std::chrono::milliseconds interval) {
  const std::lock_guard lock(mutex_);
  interval_ = interval;
  wakes_ = true;
  changed_.notify_all();
}

void WatchdogMail::post(const Beat& beat) {
  const std::lock_guard lock(mutex_);
  mine_ = beat;
}

std::vector<std::optional<Beat>> WatchdogMail::beats() const {
  const std::lock_guard lock(mutex_);
  return beats_;
}

bool WatchdogMail::is_connected() const {
  const std::lock_guard lock(mutex_);
  return connected_;
}

std::optional<Verdict> WatchdogMail::verdict() const {
  const std::lock_guard lock(mutex_);
  return verdict_;
}

void WatchdogMail::condemn(const Verdict& verdict) {
  const std::lock_guard lock(mutex_);
  to_publish_ = verdict;
  wakes_ = true;
  changed_.notify_all();
}

bool WatchdogMail::meet_at_end(int num_ranks, std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  written_ = true;
  interval_ = std::chrono::milliseconds(50);
  wakes_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, limit, [&] { return num_written_ >= num_ranks || ended_; });
  return num_written_ >= num_ranks;
}

// A connection that breaks isn't the end of the job, whose training has others: a new one is made, for as
// long as it takes.
void WatchdogMail::run() {
  for (Turn turn; !turn.stops;) {
    turn = next_turn();
    try {
      const bool connected = do_turn(turn);
      const std::lock_guard lock(mutex_);
      connected_ = connected;
    } catch (const std::exception& error) {
      lose_connection(error.what());
    }
  }
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

WatchdogMail::Turn WatchdogMail::next_turn() {
  std::unique_lock lock(mutex_);
  const auto pause = store_ ? std::min(interval_, verdict_interval(size_)) : kConnectAgain;
  changed_.wait_for(lock, pause, [this] { return wakes_; });
  const auto now = std::chrono::steady_clock::now();
  const Turn turn{wakes_ || now >= next_exchange_, stops_};
  wakes_ = false;
  if (turn.everything) next_exchange_ = now + interval_;
  return turn;
}

bool WatchdogMail::do_turn(const Turn& turn) {
  const bool is_new = !store_;
  if (is_new) store_ = connect_();
  if (!store_) return false;
  turn.everything || is_new ? exchange() : exchange_verdict();
  return true;
}

void WatchdogMail::lose_connection(const std::string& why) {
  store_ = nullptr;
  bool is_first = false;
  {
    const std::lock_guard lock(mutex_);
    connected_ = false;
    is_first = !std::exchange(loss_was_told_, true) && !stops_;
  }
  if (is_first)
    log::warning("the watchdog's connection to the job's store broke, and is made again: " +
                 why.substr(0, why.find('\n')));
}

void WatchdogMail::exchange() {
  send();
  exchange_verdict();
  exchange_end();
  fetch();
}

void WatchdogMail::send() {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    if (!mine_) return;
    text = dist::to_text(*mine_);
  }
  store_->set(beat_key(rank_), to_bytes(text));
}

// A key that isn't there would be waited for.
bool WatchdogMail::take_new_ranks() {
  std::erase_if(missing_, [&](int rank) {
    if (!store_->check({beat_key(rank)})) return false;
    came_.push_back(rank);
    return true;
  });
  return !came_.empty();
}

void WatchdogMail::fetch() {
  if (!take_new_ranks()) return;
  std::vector<std::string> keys;
  for (const int rank : came_) keys.push_back(beat_key(rank));
  const auto values = store_->multiGet(keys);
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < came_.size(); ++i) keep_beat(came_[i], read_text(values[i]));
}

// One that can't be read is left out: its rank is soon silent.
void WatchdogMail::keep_beat(int rank, const std::string& text) {
  try {
    beats_[static_cast<size_t>(rank)] = beat_from(text);
  } catch (const Error& error) {
    if (!std::exchange(bad_beat_was_told_, true)) log::warning(str("of rank ", rank, ": ", error.what()));
  }
}

// The first one holds.
void WatchdogMail::exchange_verdict() {
  std::optional<Verdict> mine;
  {
    const std::lock_guard lock(mutex_);
    if (verdict_) return;
    mine = to_publish_;
  }
  std::string text;
  if (mine)
    text = read_text(store_->compareSet(kHangVerdictKey, std::vector<uint8_t>{}, to_bytes(to_text(*mine))));
  else if (store_->check({kHangVerdictKey}))
    text = read_text(store_->get(kHangVerdictKey));
  if (text.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    verdict_ = verdict_from(text);
    changed_.notify_all();
  }
  bell_->ring();
}

void WatchdogMail::exchange_end() {
  int64_t mine = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!written_) return;
    mine = written_told_ ? 0 : 1;
  }
  const int64_t num_written = store_->add(kWrittenKey, mine);
  const std::lock_guard lock(mutex_);
  written_told_ = true;
  num_written_ = num_written;
  changed_.notify_all();
}

}  // namespace titan::dist
