#pragma once

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace virtual_gpu {

constexpr int max_ranks = 16;
constexpr size_t slot_bytes = size_t{1} << 20;
constexpr uint32_t num_steps = 8;  // as in NCCL: so many short messages are sent before one is received
constexpr size_t step_bytes = size_t{1} << 15;
constexpr size_t num_algorithms = 64;

/// Messages from one rank to another, or parts of long ones.
struct Mailbox {
  std::atomic<uint32_t> num_sent, num_received;
  struct {
    uint64_t message_bytes;  ///< those of the whole message
    char data[step_bytes];
  } steps[num_steps];
};

/// Where the ranks wait for each other.
struct Meeting {
  std::atomic<uint32_t> num_arrived;
  std::atomic<uint32_t> round;
};

/// The calls of a rank's launch, and where they have their buffers, as far as NCCL asks that the ranks agree.
struct Places {
  uint64_t calls;  ///< a hash of their texts
  char text[120];  ///< the first one's
  uint32_t num_buffers, num_registered;
  uint64_t offsets;  ///< a hash of the registered ones' offsets
};

/// Memory that the ranks of a communicator share: zeroed at first, and mapped by every process.
struct Shared {
  Meeting of_hosts, of_devices;
  std::atomic<int> processes[max_ranks];  ///< their ids, until they end the communicator
  /// Each rank's arguments of a split.
  struct {
    int color, key;
  } splits[max_ranks];
  /// 1: the sender has come to connect, 2: the receiver has, 3: both have. [sender][receiver]
  std::atomic<uint32_t> connections[max_ranks][max_ranks];
  /// The ranks, one bit each, that have come with a collective of each algorithm.
  std::atomic<uint32_t> algorithms[num_algorithms];
  /// Written before a rank's device arrives for the first time in an operation.
  Places places[max_ranks];
  char slots[max_ranks][slot_bytes];
  Mailbox mailboxes[max_ranks][max_ranks];
};

/// A communicator. Operations of one communicator run one after another, in the order in which the host submitted them.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  /// Maps the shared memory of this name. It is not connected before connect() has returned true.
  static std::shared_ptr<Communicator> open(const std::string& name, int rank, int size);
  ~Communicator();
  /// Waits for all ranks; false if the communicator was aborted meanwhile.
  bool connect();

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  Shared& shared() const { return *shared_; }
  /// As in NCCL, an abort ends what this rank waits for; other ranks learn nothing of it.
  bool is_aborted() const { return is_aborted_; }
  void abort() { is_aborted_ = true; }

  /// Whether a rank's process has gone without ending its communicator.
  bool has_lost_peer() const;
  /// By the rank that ends the communicator: nobody misses it then.
  void leave() { shared_->processes[rank_] = 0; }

  /// Waits on the host until all ranks are here. @returns false after an abort
  bool host_barrier();
  /// Counts this rank's device as arrived; the condition holds when all are, or after an abort.
  std::function<bool()> arrive() { return arrive_at(shared_->of_devices); }

  /// Places in the order of this communicator's operations.
  uint64_t take_ticket() { return next_ticket_++; }
  bool is_turn(uint64_t ticket) const { return num_finished_ == ticket; }
  void finish(uint64_t ticket) { num_finished_ = ticket + 1; }
  /// Waits on the host until all operations have run. @returns false after an abort
  bool wait_for_operations();

  /// In strict mode, what NCCL does when two ranks first send to each other: waits on the host until the peer has made
  /// the matching call.
  bool is_connected(int sender, int receiver) const { return shared_->connections[sender][receiver] == 3u; }
  void announce_connection(int sender, int receiver);
  void wait_for_connection(int sender, int receiver);
  /// The same when a collective is the first with its algorithm: waits until all ranks have made such a call.
  bool is_connected(size_t algorithm) const {
    return shared_->algorithms[algorithm] == (uint32_t{1} << size_) - 1;
  }
  void announce_algorithm(size_t algorithm) { shared_->algorithms[algorithm] |= uint32_t{1} << rank_; }
  void wait_for_algorithm(size_t algorithm);

  /// Memory that ncclCommRegister was given, and that ncclCommDeregister wasn't.
  void add_registered(const void* address, size_t bytes);
  bool remove_registered(const void* address);
  /// The offset of these bytes in registered memory that has all of them.
  std::optional<size_t> offset_of_registered(const void* address, size_t bytes) const;
  void forget_registered();

  /// Unless it blocks, its calls that wait for other ranks return ncclInProgress, which is its state until they have ended.
  bool blocks = true;
  std::atomic<ncclResult_t> state = ncclSuccess;
  int num_splits = 0;
  std::atomic<int> num_recorded = 0;  ///< calls in recordings
  std::vector<double> factors;        ///< for reductions made by ncclRedOpCreatePreMulSum

 private:
  Communicator(std::string name, int rank, int size) : name_(std::move(name)), rank_(rank), size_(size) {}
  std::function<bool()> arrive_at(Meeting& meeting);

  std::string name_;
  int rank_ = 0;
  int size_ = 1;
  Shared* shared_ = nullptr;
  std::atomic<bool> is_aborted_ = false;
  std::map<uintptr_t, size_t> registered_;  // bytes by address
  std::atomic<uint64_t> next_ticket_ = 0;
  std::atomic<uint64_t> num_finished_ = 0;
};

/// Whether any communicator of this process has registered memory at the address.
bool is_registered(const void* address);
int num_registrations();

/// Whether VIRTUAL_GPU_NCCL=strict.
bool is_strict();

}  // namespace virtual_gpu

/// NCCL's handle.
struct ncclComm {
  std::shared_ptr<virtual_gpu::Communicator> communicator;
};
