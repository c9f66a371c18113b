#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "guard/verdict.h"
#include "titan/core/error.h"

namespace titan::dist {

/// Wakes the one thread that waits; rung while nobody does, it wakes the next one that comes.
class Bell {
 public:
  void ring() {
    {
      const std::lock_guard lock(mutex_);
      rung_ = true;
    }
    changed_.notify_all();
  }
  /// False: it wasn't rung within `limit`.
  bool wait(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    const bool rung = changed_.wait_for(lock, limit, [this] { return rung_; });
    rung_ = false;
    return rung;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool rung_ = false;
};

}  // namespace titan::dist

namespace c10d {
class Store;
}

namespace titan::dist {

/// A new connection to `store`'s server; null where that doesn't take one. A socket is tried first, as c10d's
/// client would go on trying, and say so each time, for as long as its time limit.
c10::intrusive_ptr<c10d::Store> connect_again(c10d::Store& store);

}  // namespace titan::dist

namespace c10d {

// The one thread that speaks with the store for a watchdog. The store is a process that may itself hang, and
// then a call to it never returns: nobody else may wait for that.

class Store;
}  // namespace c10d

namespace titan::dist {

/// Sends this rank's beats and fetches rank 0's; rank 0 fetches all. Shared by the thread and its owner, as
/// the thread may outlive it.
class WatchdogMail : public std::enable_shared_from_this<WatchdogMail> {
 public:
  /// Makes a connection of this object's own; null where there is none to be had.
  using Connect = std::function<c10::intrusive_ptr<c10d::Store>()>;
  /// `bell` is rung when a verdict is known.
  WatchdogMail(Connect connect, std::shared_ptr<Bell> bell, int rank, int size);

  void start();
  /// Sends `last`, and waits a second at most for the thread to end; one that the store doesn't answer stays.
  void stop(Beat last);

  void set_interval(std::chrono::milliseconds interval);
  /// To be sent next.
  void post(const Beat& beat);
  /// The last beats of all ranks, by rank, as far as they were fetched.
  std::vector<std::optional<Beat>> beats() const;

  /// False: the connection is broken, and there is no new one yet. What others said is old then.
  bool is_connected() const;

  /// Somebody's verdict. It is looked for more often than beats are sent, so that all ranks come to their end
  /// together.
  std::optional<Verdict> verdict() const;
  void condemn(const Verdict& verdict);
  /// After a verdict: this rank has written all it had to. Returns when `num_ranks` have, false after
  /// `limit`.
  bool meet_at_end(int num_ranks, std::chrono::milliseconds limit);

 private:
  /// What wakes the thread, and what it then has to do.
  struct Turn {
    bool everything = false, stops = false;
  };

  void run();
  Turn next_turn();
  bool do_turn(const Turn& turn);
  void lose_connection(const std::string& why);
  void exchange();
  void send();
  void fetch();
  void keep_beat(int rank, const std::string& text);
  void exchange_verdict();
  void exchange_end();
  bool take_new_ranks();

  // The thread's own.
  const Connect connect_;
  c10::intrusive_ptr<c10d::Store> store_;  // null: none
  std::chrono::steady_clock::time_point next_exchange_{};
  const std::shared_ptr<Bell> bell_;
  const int rank_, size_;
  std::vector<int> came_;     // ranks whose beats are there; the thread's own
  std::vector<int> missing_;  // ranks to be looked for

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::chrono::milliseconds interval_{1000};
  std::optional<Beat> mine_;
  std::vector<std::optional<Beat>> beats_;
  std::optional<Verdict> verdict_, to_publish_;
  bool wakes_ = false, stops_ = false, ended_ = false, written_ = false, written_told_ = false;
  bool connected_ = true, loss_was_told_ = false, bad_beat_was_told_ = false;
  int64_t num_written_ = 0;
};

}  // namespace titan::dist
