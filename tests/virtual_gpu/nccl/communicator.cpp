#include "nccl/communicator.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string_view>
#include <thread>

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

}  // namespace

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
  return c;
}

Communicator::~Communicator() {
  if (shared_) munmap(shared_, sizeof(Shared));
}

bool Communicator::connect() {
  const bool all_came = host_barrier();
  shm_unlink(name_.c_str());  // by every rank: the first one removes the name
  return all_came;
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

void Communicator::announce_connection(int sender, int receiver) {
  shared_->connections[sender][receiver] |= sender == rank_ ? 1u : 2u;
}
void Communicator::wait_for_connection(int sender, int receiver) {
  poll([&] { return is_connected(sender, receiver) || is_aborted(); });
}

}  // namespace virtual_gpu
