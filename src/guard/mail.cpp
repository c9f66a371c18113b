#include "guard/mail.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <future>
#include <memory>
#include <numeric>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/json.h"
#include "core/threads.h"
#include "dist/rendezvous.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::dist {
namespace {

constexpr const char* kVerdictKey = "verdict";
constexpr const char* kWrittenKey = "written";
constexpr const char* kRequestsKey = "record_requests";
constexpr const char* kReasonKey = "record_reason";
constexpr auto kConnectAgain = std::chrono::seconds(1);

std::string beat_key(int rank) { return str("beat/", rank); }

// Prefixes may be nested.
c10d::Store& served_store(c10d::Store& store) {
  auto* prefix = dynamic_cast<c10d::PrefixStore*>(&store);
  return prefix ? *prefix->getUnderlyingNonPrefixStore() : store;
}

std::string to_text(const Verdict& verdict) {
  return json_text(
      nlohmann::json{{"text", verdict.text}, {"silent", verdict.silent}, {"culprits", verdict.culprits}});
}

Verdict verdict_from(const std::string& text) {
  std::string problem;
  const auto json = parse_json(text, &problem);
  if (!problem.empty()) throw Error("cannot parse a verdict about a hang: " + problem);
  return {json.at("text").get<std::string>(), json.at("silent").get<std::vector<int>>(),
          json.at("culprits").get<std::vector<int>>()};
}

// A beat that can't be parsed is left out: its rank soon counts as silent.
std::optional<Beat> parse_beat(int rank, const std::string& text) {
  static std::atomic<bool> was_logged{false};
  try {
    return beat_from(text);
  } catch (const Error& error) {
    if (!was_logged.exchange(true)) log::warning(str("rank ", rank, ": ", error.what()));
    return std::nullopt;
  }
}

}  // namespace

StorePtr connect_again(c10d::Store& store) {
  const auto* server = dynamic_cast<const c10d::TCPStore*>(&served_store(store));
  const auto is_gone = [&] { return server && !accepts_connections(server->getHost(), server->getPort()); };
  if (is_gone()) return {};
  // A process that is ending may still accept a connection, only to reset it. c10d's client then keeps trying
  // for its whole time limit, in a thread that this function abandons.
  const auto clone = std::make_shared<std::promise<StorePtr>>();
  std::future<StorePtr> cloned = clone->get_future();
  within(std::chrono::milliseconds(0), [clone, job = StorePtr::reclaim_copy(&store)] {
    try {
      clone->set_value(job->clone());
    } catch (const std::exception&) {
      clone->set_value({});
    }
  });
  while (cloned.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready)
    if (is_gone()) return {};
  return cloned.get();
}

std::chrono::milliseconds slowest_beat(int num_ranks) {
  return std::chrono::milliseconds(std::clamp(num_ranks, 500, 1000));
}

std::vector<std::optional<Beat>> read_beats(c10d::Store& store, int num_ranks) {
  std::vector<int> ranks(static_cast<size_t>(num_ranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto keys = [&] {
    std::vector<std::string> keys;
    for (const int rank : ranks) keys.push_back(beat_key(rank));
    return keys;
  };
  // multiGet() would wait for a key that doesn't exist yet.
  if (!store.check(keys())) std::erase_if(ranks, [&](int rank) { return !store.check({beat_key(rank)}); });
  std::vector<std::optional<Beat>> beats(static_cast<size_t>(num_ranks));
  if (ranks.empty()) return beats;
  const auto values = store.multiGet(keys());
  for (size_t i = 0; i < ranks.size(); ++i)
    beats[static_cast<size_t>(ranks[i])] = parse_beat(ranks[i], {values[i].begin(), values[i].end()});
  return beats;
}

std::optional<Beat> read_beat(c10d::Store& store, int rank) {
  if (!store.check({beat_key(rank)})) return std::nullopt;
  return parse_beat(rank, store.get_to_str(beat_key(rank)));
}

std::string host_of(c10d::Store& store) {
  const auto* server = dynamic_cast<const c10d::TCPStore*>(&served_store(store));
  return server ? server->getHost() : "";
}

void request_records(c10d::Store& store, const std::string& reason) {
  store.set(kReasonKey, reason);
  store.add(kRequestsKey, 1);
}

Mail::Mail(Connect connect, int rank, int size) : connect_(std::move(connect)), rank_(rank), size_(size) {
  inbox_.beats.resize(static_cast<size_t>(size));
}

const Mail::Inbox& Mail::exchange(const Outbox& outbox, bool everything) {
  const bool is_new = !store_;
  try {
    inbox_.is_connected = connect();
    if (!inbox_.is_connected) return inbox_;
    // A verdict is sent before the beat that reports its rank's end, and read after that beat, so that no
    // rank sees a judge's end without its verdict and judges in its place.
    if (outbox.verdict) exchange_verdict(outbox);
    if (everything || is_new) {
      store_->set(beat_key(rank_), dist::to_text(outbox.beat));
      exchange_requests(outbox);
      exchange_end(outbox);
      fetch_beats();
    }
    exchange_verdict(outbox);
  } catch (const std::exception& error) {
    lose_connection(error.what());
  }
  return inbox_;
}

bool Mail::connect() {
  if (store_) return true;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_try_) return false;
  next_try_ = now + kConnectAgain;
  store_ = connect_();
  return store_ != nullptr;
}

// A broken connection isn't the end of the job, whose training has others.
void Mail::lose_connection(const std::string& why) {
  store_ = nullptr;
  inbox_.is_connected = false;
  if (!std::exchange(has_logged_loss_, true))
    log::warning("the watchdog lost its connection to the job's store and reconnects: " +
                 why.substr(0, why.find('\n')));
}

void Mail::fetch_beats() {
  auto beats = read_beats(*store_, rank_ == 0 ? size_ : 1);
  for (size_t rank = 0; rank < beats.size(); ++rank)
    if (beats[rank]) inbox_.beats[rank] = std::move(beats[rank]);
}

void Mail::exchange_requests(const Outbox& outbox) {
  if (!outbox.record_request.empty()) request_records(*store_, outbox.record_request);
  const int64_t num_requests = store_->add(kRequestsKey, 0);
  if (num_requests == inbox_.num_record_requests) return;
  inbox_.record_request = store_->get_to_str(kReasonKey);
  inbox_.num_record_requests = num_requests;
}

void Mail::exchange_verdict(const Outbox& outbox) {
  if (inbox_.verdict) return;
  if (outbox.verdict) {
    inbox_.verdict = verdict_from(store_->compareSet(kVerdictKey, "", to_text(*outbox.verdict)));
  } else if (store_->check({kVerdictKey})) {
    inbox_.verdict = verdict_from(store_->get_to_str(kVerdictKey));
  }
}

void Mail::exchange_end(const Outbox& outbox) {
  if (!outbox.has_written) return;
  inbox_.num_written = store_->add(kWrittenKey, has_reported_end_ ? 0 : 1);
  has_reported_end_ = true;
}

}  // namespace titan::dist
