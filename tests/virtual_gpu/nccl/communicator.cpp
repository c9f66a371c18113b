#include "nccl/communicator.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string_view>
#include <thread>
#include <utility>

#include "runtime/virtual_gpu.h"

namespace virtual_gpu {
namespace {

// Waits for other processes without taking the cores that they need.
template <class Condition>
void poll(Condition condition) {
  for (int i = 0; !condition(); ++i) {
    if (i < 100)
      sched_yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// Registrations of all communicators: their number by address.
struct Registered {
  std::mutex mutex;
  std::map<uintptr_t, int> counts;
};
Registered& registered() {
  static auto& all = *new Registered;
  return all;
}

// Under the lock.
void count_registered(uintptr_t address, int change) {
  auto& counts = registered().counts;
  if ((counts[address] += change) == 0) counts.erase(address);
}

}  // namespace

bool is_registered(const void* address) {
  const std::lock_guard lock(registered().mutex);
  return registered().counts.contains(reinterpret_cast<uintptr_t>(address));
}

int num_registrations() {
  const std::lock_guard lock(registered().mutex);
  int sum = 0;
  for (const auto& [address, count] : registered().counts) sum += count;
  return sum;
}

bool is_strict() {
  static const bool strict = [] {
    const char* mode = std::getenv("VIRTUAL_GPU_NCCL");
    if (!mode || std::string_view(mode) == "buffered") return false;
    if (std::string_view(mode) == "strict") return true;
    not_supported(std::string("VIRTUAL_GPU_NCCL=") + mode, "It is 'buffered' or 'strict'.");
  }();
  return strict;
}

std::shared_ptr<Communicator> Communicator::open(const std::string& name, int rank, int size) {
  if (size > max_ranks)
    not_supported("a communicator of " + std::to_string(size) + " ranks", "At most 16 can meet.");
  std::shared_ptr<Communicator> c(new Communicator(name, rank, size));
  const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0) return nullptr;
  void* memory = MAP_FAILED;
  if (ftruncate(file, sizeof(Shared)) == 0)
    memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return nullptr;
  c->shared_ = static_cast<Shared*>(memory);
  c->shared_->processes[rank] = getpid();
  return c;
}

Communicator::~Communicator() {
  forget_registered();
  if (shared_) munmap(shared_, sizeof(Shared));
}

bool Communicator::connect() {
  const bool all_came = host_barrier();
  shm_unlink(name_.c_str());  // by every rank: the first one removes the name
  return all_came;
}

bool Communicator::has_lost_peer() const {
  return std::any_of(shared_->processes, shared_->processes + size_,
                     [](int process) { return process != 0 && kill(process, 0) != 0 && errno == ESRCH; });
}

std::function<bool()> Communicator::arrive_at(Meeting& meeting) {
  const uint32_t round = meeting.round;
  if (meeting.num_arrived.fetch_add(1) + 1 == static_cast<uint32_t>(size_)) {
    meeting.num_arrived = 0;
    meeting.round = round + 1;
  }
  return [this, &meeting, round] { return meeting.round != round || is_aborted_; };
}

bool Communicator::host_barrier() {
  poll(arrive_at(shared_->of_hosts));
  return !is_aborted();
}

bool Communicator::wait_for_operations() {
  poll([this] { return num_finished_ == next_ticket_ || is_aborted_; });
  return !is_aborted();
}

void Communicator::add_registered(const void* address, size_t bytes) {
  const std::lock_guard lock(registered().mutex);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (registered_.emplace(begin, bytes).second) count_registered(begin, 1);
}
bool Communicator::remove_registered(const void* address) {
  const std::lock_guard lock(registered().mutex);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (registered_.erase(begin) == 0) return false;
  count_registered(begin, -1);
  return true;
}
std::optional<size_t> Communicator::offset_of_registered(const void* address, size_t bytes) const {
  const std::lock_guard lock(registered().mutex);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  auto found = registered_.upper_bound(begin);
  if (found == registered_.begin()) return std::nullopt;
  --found;
  if (begin + bytes > found->first + found->second) return std::nullopt;
  return begin - found->first;
}
void Communicator::forget_registered() {
  const std::lock_guard lock(registered().mutex);
  for (const auto& [address, bytes] : std::exchange(registered_, {})) count_registered(address, -1);
}

void Communicator::announce_connection(int sender, int receiver) {
  shared_->connections[sender][receiver] |= sender == rank_ ? 1u : 2u;
}
void Communicator::wait_for_connection(int sender, int receiver) {
  poll([&] { return is_connected(sender, receiver) || is_aborted(); });
}
void Communicator::wait_for_algorithm(size_t algorithm) {
  poll([&] { return is_connected(algorithm) || is_aborted(); });
}

}  // namespace virtual_gpu
