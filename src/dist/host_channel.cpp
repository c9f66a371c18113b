#include "host_channel.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dist/flight_record.h"
#include "titan/core/error.h"

namespace titan::dist {

// Each has a cache line and its neighbour: ranks write their own slot only.
struct alignas(128) HostChannel::Slot {
  std::atomic<uint64_t> posted;    // the number of the call that is posted
  std::atomic<uint64_t> finished;  // the number of the last call whose reads are done
  std::atomic<uint32_t> gave_up;
  std::atomic<int32_t> pid;
  uint64_t token;  // every peer reads it once: does process_vm_readv work, and is it the right process?
  Posting posting;
};

struct HostChannel::Block {
  alignas(128) std::atomic<uint32_t> bell;  // changes with every slot; the ranks sleep on it
};

namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

constexpr uint64_t kToken = 0x7469746e686f7374;
constexpr size_t kHeaderBytes = 128;

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, long milliseconds) {
  const timespec time{milliseconds / 1000, (milliseconds % 1000) * 1000000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// Rank 0 makes it: a file without a name that goes with the last process that has it open. The others open
/// it through rank 0's descriptor.
int make_shared_file(c10d::Store& store, size_t bytes) {
  int file = memfd_create("titan_group", MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    close(file);
    file = -1;
  }
  store.set("file", file >= 0 ? str("/proc/", getpid(), "/fd/", file) : "none");
  return file;
}

int open_shared_file(c10d::Store& store) {
  return open(store.get_to_str("file").c_str(), O_RDWR | O_CLOEXEC);
}

bool read_process(int pid, const void* source, void* target, uint64_t bytes) {
  auto* to = static_cast<char*>(target);
  auto* from = static_cast<const char*>(source);
  while (bytes > 0) {
    const iovec local{to, bytes}, remote{const_cast<char*>(from), bytes};
    const ssize_t n = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    to += n;
    from += n;
    bytes -= static_cast<uint64_t>(n);
  }
  return true;
}

}  // namespace

HostChannel::HostChannel(const GroupSpec& spec)
    : rank_(spec.rank),
      size_(spec.size),
      timeout_(spec.timeout.count()),
      block_bytes_(kHeaderBytes + sizeof(Slot) * static_cast<size_t>(spec.size)) {}

HostChannel::~HostChannel() {
  if (block_) munmap(block_, block_bytes_);
  if (file_ >= 0) close(file_);
}

HostChannel::Slot& HostChannel::slot(int rank) const {
  auto* first = reinterpret_cast<char*>(block_) + kHeaderBytes;
  return reinterpret_cast<Slot*>(first)[rank];
}

bool HostChannel::attach(c10d::Store& store) {
  // Where Yama lets only ancestors read a process (ptrace_scope 1), this lets every process of the same user.
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  const int file = rank_ == 0 ? make_shared_file(store, block_bytes_) : open_shared_file(store);
  if (file < 0) return false;
  void* memory = mmap(nullptr, block_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (rank_ == 0)
    file_ = file;
  else
    close(file);
  if (memory == MAP_FAILED) return false;
  // Fresh pages are zero, which is what every field starts from.
  block_ = static_cast<Block*>(memory);
  Slot& mine = slot(rank_);
  mine.token = kToken + static_cast<uint64_t>(rank_);
  mine.posting.address = &mine.token;
  mine.pid.store(getpid());
  return true;
}

bool HostChannel::can_read() {
  if (file_ >= 0) close(std::exchange(file_, -1));
  for (int peer = 0; peer < size_; ++peer) {
    const Slot& theirs = slot(peer);
    uint64_t token = 0;
    if (!read_process(theirs.pid, theirs.posting.address, &token, sizeof(token))) return false;
    if (token != kToken + static_cast<uint64_t>(peer)) return false;
  }
  return true;
}

void HostChannel::ring() const {
  block_->bell.fetch_add(1);
  futex_wake_all(block_->bell);
}

void HostChannel::post(const Posting& posting) {
  TITAN_CHECK(broken_.empty(), "an earlier call of the group failed: ", broken_);
  mine_ = posting;
  Slot& mine = slot(rank_);
  mine.posting = posting;
  mine.posted.store(++call_);
  ring();
}

void HostChannel::meet(int peer) {
  wait_for(peer, slot(peer).posted, "come to");
  // Nobody posts the next call before all have finished this one, so the posting belongs to this call.
  const Posting& theirs = slot(peer).posting;
  if (theirs.op == mine_.op && theirs.bytes == mine_.bytes) return;
  const auto name = [](const Posting& posting) {
    return str(name_of(static_cast<CollectiveOp>(posting.op)), " of ", posting.bytes, " bytes");
  };
  fail(peer, str("calls ", name(theirs), " where this rank calls ", name(mine_)));
}

void HostChannel::read(int peer, uint64_t offset, void* target, uint64_t bytes) {
  const Slot& theirs = slot(peer);
  const auto* source = static_cast<const char*>(theirs.posting.address) + offset;
  if (!read_process(theirs.pid, source, target, bytes))
    fail(peer, str("can't be read: ", std::strerror(errno)));
}

void HostChannel::finish() {
  slot(rank_).finished.store(call_);
  ring();
  for (int peer = 0; peer < size_; ++peer) wait_for(peer, slot(peer).finished, "finish");
}

void HostChannel::give_up() {
  slot(rank_).gave_up.store(1);
  ring();
}

void HostChannel::wait_for(int peer, const std::atomic<uint64_t>& value, const char* what) {
  constexpr long longest_sleep_ms = 50;  // between looks at whether the peer is still there
  const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_);
  while (value.load() < call_) {
    const uint32_t seen = block_->bell.load();
    if (value.load() >= call_) return;
    check_alive(peer, value);
    if (Clock::now() > deadline) {
      fail(peer, str("didn't ", what, " the call within ", static_cast<double>(timeout_) / 1000, " s"));
    }
    futex_wait(block_->bell, seen, longest_sleep_ms);
  }
}

void HostChannel::check_alive(int peer, const std::atomic<uint64_t>& value) {
  const Slot& theirs = slot(peer);
  const bool ended = kill(theirs.pid, 0) != 0 && errno == ESRCH;
  const bool gave_up = theirs.gave_up.load();
  // It may have done its part just before it left.
  if ((!ended && !gave_up) || value.load() >= call_) return;
  fail(peer,
       ended ? str("has ended (its pid was ", theirs.pid.load(), ")") : "gave up after an error of its own");
}

void HostChannel::fail(int peer, const std::string& reason) {
  broken_ = str("rank ", peer, " of the group ", reason);
  give_up();
  throw Error(broken_);
}

}  // namespace titan::dist
