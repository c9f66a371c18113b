#pragma once

// The messages between the ranks' watchdogs, as keys of the job's store. The store is a process that may
// itself hang, and then a call to it never returns: so every function here may block forever, and belongs on
// a SideThread.

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "guard/progress.h"

namespace c10d {
class Store;
}

namespace titan::dist {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Returns a new connection to `store`'s server, or null if that doesn't accept one. It tries a plain socket
/// first: c10d's client would keep trying, and log each attempt, until its time limit.
StorePtr connect_again(c10d::Store& store);

/// The longest time between two beats of a rank. It is longer in a large job, to relieve the store.
std::chrono::milliseconds slowest_beat(int num_ranks);

/// The last beats of the first `num_ranks` ranks; nullopt for a rank without one, or whose beat can't be
/// parsed.
std::vector<std::optional<Beat>> read_beats(c10d::Store& store, int num_ranks);

/// A rank's last beat.
std::optional<Beat> read_beat(c10d::Store& store, int rank);

/// The host name or address of the server of `store`; "": it has none.
std::string host_of(c10d::Store& store);

/// Asks all ranks to write their flight records, for `reason`.
void request_records(c10d::Store& store, const std::string& reason);

/// Sends this rank's beats and fetches rank 0's; rank 0 fetches all. One thread at a time.
class Mail {
 public:
  /// Makes a new connection; returns null if that isn't possible.
  using Connect = std::function<StorePtr()>;

  struct Outbox {
    Beat beat;
    std::optional<Verdict> verdict;  ///< this rank's own; the first rank's verdict holds
    /// Why all ranks should write their flight records. Each text is sent once.
    std::string record_request;
    bool has_written = false;  ///< after a verdict: this rank's files are written
  };

  struct Inbox {
    bool is_connected = true;                ///< false: the other ranks' messages are old
    std::vector<std::optional<Beat>> beats;  ///< by rank, as far as they were fetched
    std::optional<Verdict> verdict;
    int64_t num_record_requests = 0;
    std::string record_request;  ///< the reason of the last request
    int64_t num_written = 0;     ///< ranks whose files are written
  };

  Mail(Connect connect, int rank, int size);

  /// Exchanges everything, or (`everything` is false) only looks for a verdict. A broken connection isn't an
  /// error: the next exchange makes a new one, once a second at most.
  const Inbox& exchange(const Outbox& outbox, bool everything);

 private:
  bool connect();
  void lose_connection(const std::string& why);
  void fetch_beats();
  void exchange_requests(const Outbox& outbox);
  void exchange_verdict(const Outbox& outbox);
  void exchange_end(const Outbox& outbox);

  const Connect connect_;
  const int rank_, size_;
  StorePtr store_;  // null: not connected
  std::chrono::steady_clock::time_point next_try_{};
  Inbox inbox_;
  bool has_reported_end_ = false, has_logged_loss_ = false;
};

}  // namespace titan::dist
