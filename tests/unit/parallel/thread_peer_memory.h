#pragma once

// dist::SymmetricMemory for ranks that are threads. Its queues are threads, too, with random pauses. Every
// access has a logical clock (Mattern, "Virtual time and global states of distributed systems", 1989). Two
// unordered accesses to one place, one of them a write, are reported, independent of when they actually run.

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "dist/device_backend.h"
#include "titan/core/error.h"
#include "titan/ops/linear.h"

namespace titan::testing {

constexpr auto kPatience = std::chrono::seconds(20);

/// For each actor, the number of its events that happened before. Actor 2r is rank r's computation, 2r + 1
/// its queue.
using Clock = std::vector<int64_t>;

inline void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

/// One rank's memory, with a record of accesses.
class Piece {
 public:
  explicit Piece(int64_t bytes)
      : bytes_(at::full({bytes}, 0xff, at::kByte)) {}  // NaN in every floating-point dtype

  int64_t size() const { return bytes_.numel(); }
  at::Tensor part(int64_t offset, int64_t bytes) const { return bytes_.narrow(0, offset, bytes); }
  char* data(int64_t offset) const { return static_cast<char*>(bytes_.data_ptr()) + offset; }

  /// Describes the conflict, or returns "".
  std::string note(size_t actor, Clock& clock, bool writes, int64_t offset, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    std::string problem;
    for (const Access& earlier : accesses_) {
      const bool overlaps = earlier.offset < offset + bytes && offset < earlier.offset + earlier.bytes;
      if (overlaps && (writes || earlier.writes) && earlier.tick > clock[earlier.actor])
        problem = str(writes ? "write" : "read", " by actor ", actor, " isn't ordered after the ",
                      earlier.writes ? "write" : "read", " by actor ", earlier.actor);
    }
    accesses_.push_back({actor, ++clock[actor], writes, offset, bytes});
    return problem;
  }

 private:
  struct Access {
    size_t actor;
    int64_t tick;
    bool writes;
    int64_t offset, bytes;
  };
  at::Tensor bytes_;
  std::mutex mutex_;
  std::vector<Access> accesses_;
};

/// The state that all ranks share: barriers, and a list of conflicts.
class MeetingPlace {
 public:
  explicit MeetingPlace(int size) : size_(size) {}
  int size() const { return size_; }

  /// Waits until all ranks reach their `number`th barrier of this kind. `clock` is then after all ranks'
  /// clocks.
  void meet(const std::string& kind, int64_t number, Clock& clock) {
    std::unique_lock lock(mutex_);
    Meeting& meeting = meetings_[{kind, number}];
    if (meeting.clock.empty()) meeting.clock.resize(clock.size());
    join(meeting.clock, clock);
    ++meeting.come;
    changed_.notify_all();
    TITAN_CHECK(changed_.wait_for(lock, kPatience, [&] { return meeting.come == size_; }), kind, " ", number,
                ": only ", meeting.come, " of ", size_, " ranks have arrived");
    clock = meeting.clock;
  }
  void post(int rank, std::shared_ptr<Piece> piece) {
    const std::lock_guard lock(mutex_);
    posted_[rank] = std::move(piece);
  }
  std::vector<std::shared_ptr<Piece>> posted() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Piece>> pieces;
    for (const auto& [rank, piece] : posted_) pieces.push_back(piece);
    return pieces;
  }
  void report(const std::string& problem) {
    const std::lock_guard lock(mutex_);
    if (!problem.empty()) problems_.push_back(problem);
  }
  std::vector<std::string> problems() {
    const std::lock_guard lock(mutex_);
    return problems_;
  }

 private:
  struct Meeting {
    int come = 0;
    Clock clock;
  };
  int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<std::string, int64_t>, Meeting> meetings_;
  std::map<int, std::shared_ptr<Piece>> posted_;
  std::vector<std::string> problems_;
};

enum class Queues {
  Beside,  ///< each queue is a thread, with pauses
  InOrder  ///< each request runs at once, as on a device with the least concurrency
};

class ThreadPeerMemory final : public dist::SymmetricMemory {
 public:
  ThreadPeerMemory(std::shared_ptr<MeetingPlace> place, int rank, Queues queues)
      : place_(std::move(place)),
        rank_(rank),
        queues_(queues),
        pauses_(static_cast<unsigned>(rank)),
        computation_(2 * static_cast<size_t>(place_->size())),
        queue_(computation_.size()) {
    if (queues == Queues::Beside) thread_ = std::thread([this] { work(); });
  }
  ~ThreadPeerMemory() override {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  int rank() const override { return rank_; }
  int size() const override { return place_->size(); }

  void reserve(int64_t bytes) override {
    if (!pieces_.empty() && pieces_[static_cast<size_t>(rank_)]->size() >= bytes) return;
    place_->post(rank_, std::make_shared<Piece>(bytes));
    place_->meet("post", num_reserved_, computation_);
    auto pieces = place_->posted();
    place_->meet("take", num_reserved_++, computation_);
    for (const auto& piece : pieces)
      TITAN_CHECK(piece->size() == bytes, "a rank reserves ", piece->size(), " bytes, but another one ",
                  bytes);
    wait(now());
    pieces_ = std::move(pieces);
  }
  at::Tensor mine(int64_t offset, at::IntArrayRef sizes, at::ScalarType dtype) override {
    const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
    note(2 * static_cast<size_t>(rank_), computation_, rank_, false, offset, bytes);
    return pieces_[static_cast<size_t>(rank_)]->part(offset, bytes).view(dtype).view(sizes);
  }

  void read(const at::Tensor& target, int peer, int64_t offset) override {
    copy(target, peer, offset, /*writes=*/false);
  }
  void write(int peer, int64_t offset, const at::Tensor& source) override {
    copy(source, peer, offset, /*writes=*/true);
  }
  void barrier() override {
    ask([this, number = num_barriers_++] { place_->meet("barrier", number, queue_); });
  }
  Moment now() override { return num_asked_; }

  void wait(Moment moment) override {
    std::unique_lock lock(mutex_);
    TITAN_CHECK(changed_.wait_for(lock, kPatience,
                                  [&] { return error_ || static_cast<Moment>(done_.size()) >= moment; }),
                "rank ", rank_, "'s queue doesn't reach moment ", moment);
    if (error_) std::rethrow_exception(error_);
    if (moment > 0) join(computation_, done_[static_cast<size_t>(moment - 1)]);
  }

 private:
  void note(size_t actor, Clock& clock, int piece, bool writes, int64_t offset, int64_t bytes) {
    const std::string problem =
        pieces_[static_cast<size_t>(piece)]->note(actor, clock, writes, offset, bytes);
    if (!problem.empty()) place_->report(str("piece ", piece, ", from byte ", offset, ": ", problem));
  }

  // Holds the tensor's memory weakly, because the caller must keep it alive.
  void copy(const at::Tensor& tensor, int peer, int64_t offset, bool writes) {
    TITAN_CHECK(tensor.is_contiguous() && offset % kAlignment == 0,
                "expected a contiguous tensor and an aligned offset");
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    ask([=, this, storage = tensor.storage().getWeakStorageImpl(),
         data = static_cast<char*>(tensor.data_ptr())]() mutable {
      const auto kept = storage.lock();
      if (!kept) return place_->report(str("rank ", rank_, ": a tensor is freed before the queue uses it"));
      note(2 * static_cast<size_t>(rank_) + 1, queue_, peer, writes, offset, bytes);
      char* place = pieces_[static_cast<size_t>(peer)]->data(offset);
      std::memcpy(writes ? place : data, writes ? data : place, static_cast<size_t>(bytes));
    });
  }

  void ask(std::function<void()> operation) {
    ++computation_[2 * static_cast<size_t>(rank_)];
    ++num_asked_;
    const auto ordered = [this, operation = std::move(operation), before = computation_] {
      join(queue_, before);
      operation();
      const std::lock_guard lock(mutex_);
      done_.push_back(queue_);
    };
    if (queues_ == Queues::InOrder) return ordered();
    {
      const std::lock_guard lock(mutex_);
      asked_.push_back(ordered);
    }
    changed_.notify_all();
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ended_ || !asked_.empty(); });
      if (asked_.empty()) return;
      const auto operation = std::move(asked_.front());
      asked_.pop_front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(pauses_() % 400));
      std::exception_ptr error;
      try {
        operation();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      changed_.notify_all();
      if (!error) continue;
      error_ = error;
      return;
    }
  }

  std::shared_ptr<MeetingPlace> place_;
  int rank_;
  Queues queues_;
  std::minstd_rand pauses_;
  std::vector<std::shared_ptr<Piece>> pieces_;  // all ranks' pieces
  int64_t num_reserved_ = 0, num_barriers_ = 0;
  Moment num_asked_ = 0;
  Clock computation_, queue_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> asked_;
  std::vector<Clock> done_;  // the queue's clock after each
  std::exception_ptr error_;
  bool ended_ = false;
  std::thread thread_;
};

/// Messages between ranks that are threads. They don't order accesses to the ranks' shared memory.
class ThreadRankParts final : public ops::RankParts {
 public:
  struct Shared {
    explicit Shared(int size) : place(size), given(static_cast<size_t>(size)) {}
    MeetingPlace place;
    std::vector<at::Tensor> given;
  };
  ThreadRankParts(std::shared_ptr<Shared> shared, int rank) : shared_(std::move(shared)), rank_(rank) {}

  int index() const override { return rank_; }
  int count() const override { return shared_->place.size(); }
  void all_gather(const at::Tensor& out, const at::Tensor& in, const char* /*phase*/) const override {
    Clock none;
    shared_->given[static_cast<size_t>(rank_)] = in;
    shared_->place.meet("given", num_calls_, none);
    for (int rank = 0; rank < count(); ++rank) out[rank].copy_(shared_->given[static_cast<size_t>(rank)]);
    shared_->place.meet("taken", num_calls_++, none);
  }

 private:
  std::shared_ptr<Shared> shared_;
  int rank_;
  mutable int64_t num_calls_ = 0;
};

/// Runs `rank(r)` for all ranks r, each in a thread, and throws the first error.
inline void run_ranks(int size, const std::function<void(int)>& rank) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r)
    threads.emplace_back([&, r] {
      try {
        rank(r);
      } catch (...) {
        errors[static_cast<size_t>(r)] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace titan::testing
