#include "guard/life_lines.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <random>
#include <sstream>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/process.h"
#include "core/threads.h"
#include "dist/backends.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::dist {
namespace {

constexpr auto kLook = std::chrono::milliseconds(200);

// A host counts as gone after these probes, 6 s after its last answer.
constexpr int kIdleS = 2, kIntervalS = 1, kProbes = 4;

/// Closes its socket.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// The numeric address and port of a listening rank, a word that no stranger knows, and its host's identity: containers may share a name.
struct Door {
  std::string address, port, word, host;
};

std::string to_text(const Door& door) {
  return str(door.address, " ", door.port, " ", door.word, " ", door.host);
}
Door door_from(const std::string& text) {
  Door door;
  std::istringstream(text) >> door.address >> door.port >> door.word >> door.host;
  return door;
}

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

std::optional<Address> numeric_address(const std::string& host, const std::string& port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return std::nullopt;
  Address address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.size = found->ai_addrlen;
  freeaddrinfo(found);
  return address;
}

Socket make_socket(int family, int flags) {
  return Socket(socket(family, SOCK_STREAM | SOCK_CLOEXEC | flags, 0));
}

void watch_host(const Socket& line) {
  const auto set = [&](int level, int name, int value) {
    setsockopt(line.fd(), level, name, &value, sizeof value);
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kIdleS);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kIntervalS);
  set(IPPROTO_TCP, TCP_KEEPCNT, kProbes);
}

/// A line to another rank.
struct Line {
  int rank = -1;
  std::string host;
  Socket socket;
  bool is_over = false;
};

}  // namespace

class LifeLines::Ring {
 public:
  Ring(Mail::Connect connect, int rank, int size)
      : connect_(std::move(connect)),
        rank_(rank),
        size_(size),
        previous_((rank + size - 1) % size),
        to_call_{(rank + 1) % size} {
    if (rank != 0 && to_call_[0] != 0 && previous_ != 0) to_call_.push_back(0);
    num_missing_ = static_cast<int>(to_call_.size()) + 1;
  }

  /// A turn of the thread. The store may block it.
  void look() {
    try {
      if (!listener_ && !was_refused_) open_door();
      if (listener_) std::erase_if(to_call_, [this](int rank) { return call(rank); });
      if (to_call_.empty()) store_ = nullptr;
    } catch (const std::exception&) {
      store_ = nullptr;  // the next turn connects again
    }
    if (listener_) accept_callers();
    for (Line& line : lines_) read(line);
  }

  std::optional<Loss> loss() const {
    const std::lock_guard lock(mutex_);
    return loss_;
  }
  bool are_laid() const { return num_missing_ == 0; }

 private:
  static std::string key_of(int rank) { return str("line/", rank); }
  static std::string address_key_of(int rank) { return str("address/", rank); }

  c10d::Store* store() {
    if (!store_) store_ = connect_();
    return store_.get();
  }

  // This host's address on the route to the store. On the store's own host there is none, so the rank that
  // calls says whether it calls from elsewhere. nullopt: it hasn't said so yet.
  std::optional<std::string> own_address(c10d::Store& doors) {
    const std::string towards = address_towards(host_of(doors));
    if (!std::exchange(has_told_address_, true)) doors.set(address_key_of(rank_), towards);
    if (!towards.empty()) return towards;
    // Rank 0 is called by all: the first one that has an address is on another host.
    std::string caller;
    for (int rank = 0; rank < size_ && caller.empty(); ++rank) {
      if (rank == rank_ || (rank_ != 0 && rank != previous_)) continue;
      if (!doors.check({address_key_of(rank)})) return std::nullopt;
      caller = doors.get_to_str(address_key_of(rank));
    }
    const std::string address = caller.empty() ? "" : address_towards(caller);
    return address.empty() ? "127.0.0.1" : address;
  }

  void open_door() {
    c10d::Store* const doors = store();
    const auto own = doors ? own_address(*doors) : std::nullopt;
    if (!own) return;
    own_ = {*own, "0", str(std::random_device()(), ".", std::random_device()()), host_identity()};
    auto address = numeric_address(own_.address, own_.port);
    Socket door = address ? make_socket(address->storage.ss_family, SOCK_NONBLOCK) : Socket();
    char port[NI_MAXSERV] = "";
    if (!door || bind(door.fd(), address->get(), address->size) != 0 ||
        listen(door.fd(), rank_ == 0 ? size_ : 8) != 0 ||
        getsockname(door.fd(), reinterpret_cast<sockaddr*>(&address->storage), &address->size) != 0 ||
        getnameinfo(address->get(), address->size, nullptr, 0, port, sizeof port, NI_NUMERICSERV) != 0) {
      was_refused_ = true;
      return refuse(str("listen at ", own_.address), to_call_[0]);
    }
    own_.port = port;
    doors->set(key_of(rank_), to_text(own_));
    listener_ = std::move(door);
  }

  /// Whether it was tried.
  bool call(int rank) {
    c10d::Store* const doors = store();
    if (!doors || !doors->check({key_of(rank)})) return false;
    const Door door = door_from(doors->get_to_str(key_of(rank)));
    if (rank == 0) store_host_ = door.host;
    const auto address = numeric_address(door.address, door.port);
    Socket line = address ? make_socket(address->storage.ss_family, 0) : Socket();
    const timeval limit{2, 0};  // Linux applies it to connect(), too
    if (line) setsockopt(line.fd(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    const std::string greeting = str(door.word, " ", rank_, " ", own_.host);
    if (!line || connect(line.fd(), address->get(), address->size) != 0 ||
        send(line.fd(), greeting.data(), greeting.size(), MSG_NOSIGNAL) !=
            static_cast<ssize_t>(greeting.size())) {
      refuse(str("connect to rank ", rank, " at ", door.address, " port ", door.port), rank);
    } else {
      lay({rank, door.host, std::move(line)});
    }
    return true;
  }

  void lay(Line line) {
    watch_host(line.socket);
    lines_.push_back(std::move(line));
    --num_missing_;
  }

  void accept_callers() {
    while (Socket caller = Socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)))
      callers_.push_back(std::move(caller));
    std::erase_if(callers_, [this](Socket& caller) { return hear(caller); });
  }

  // Whether the caller has spoken. Its greeting comes in one piece: it is shorter than any packet.
  bool hear(Socket& caller) {
    std::string greeting(512, '\0');
    const ssize_t got = recv(caller.fd(), greeting.data(), greeting.size(), 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    greeting.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
    std::string word;
    Line line;
    std::istringstream(greeting) >> word >> line.rank >> line.host;
    if (word != own_.word) return true;
    line.socket = std::move(caller);
    if (line.rank == 0) store_host_ = line.host;
    if (line.rank == previous_)
      lay(std::move(line));
    else
      kept_.push_back(std::move(line.socket));
    return true;
  }

  // Nobody writes to a line, so there is nothing to read but its end.
  void read(Line& line) {
    if (!line.socket || line.is_over) return;
    char byte = 0;
    const ssize_t got = recv(line.socket.fd(), &byte, 1, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    const int error = got < 0 ? errno : ECONNRESET;
    line.is_over = true;
    const bool is_host = error != ECONNRESET;
    if (!is_host && has_reported_its_end(line.rank)) return;
    const std::vector<int> ranks = is_host ? ranks_on(line) : std::vector{line.rank};
    const std::string how = is_host ? str("host ", line.host.substr(0, line.host.find('/')), " is gone (",
                                          std::strerror(error), ")")
                                    : "its process is gone";
    const std::lock_guard lock(mutex_);
    if (!loss_) loss_ = Loss{ranks, how, is_host};
  }

  // If the store is gone, too, the job is over anyway.
  bool has_reported_its_end(int rank) {
    try {
      c10d::Store* const beats = store();
      const auto beat = beats ? read_beat(*beats, rank) : std::nullopt;
      store_ = nullptr;
      return beat && beat->state >= RunState::Left;
    } catch (const std::exception&) {
      store_ = nullptr;
      return false;
    }
  }

  // Those on the host of a line. Doesn't ask a store that is lost with it.
  std::vector<int> ranks_on(const Line& line) {
    std::vector<int> ranks;
    try {
      c10d::Store* const doors = line.rank == 0 || line.host == store_host_ ? nullptr : store();
      for (int rank = 0; doors && rank < size_; ++rank)
        if (doors->check({key_of(rank)}) && door_from(doors->get_to_str(key_of(rank))).host == line.host)
          ranks.push_back(rank);
    } catch (const std::exception&) {
      ranks.clear();
    }
    store_ = nullptr;
    if (ranks.empty()) ranks.push_back(line.rank);
    return ranks;
  }

  // Without a line, a lost rank is noticed when its beats don't arrive.
  void refuse(const std::string& what, int rank) {
    const int error = errno;
    if (has_reported_its_end(rank)) return;
    log::warning(str("the watchdog can't ", what, ": ", std::strerror(error), "; a loss of rank ", rank,
                     " is noticed later"));
  }

  const Mail::Connect connect_;
  const int rank_, size_, previous_;
  StorePtr store_;  // while it is needed
  Door own_;
  Socket listener_;
  std::vector<Socket> callers_;  // that haven't spoken
  bool was_refused_ = false, has_told_address_ = false;
  std::vector<int> to_call_;
  std::vector<Line> lines_;
  std::vector<Socket> kept_;  // by rank 0, for the others' sake
  std::string store_host_;
  std::atomic<int> num_missing_{0};

  mutable std::mutex mutex_;  // guards the loss
  std::optional<Loss> loss_;
};

LifeLines::LifeLines(Mail::Connect connect, int rank, int size) {
  if (size == 1) return;
  ring_ = std::make_shared<Ring>(std::move(connect), rank, size);
  thread_ = std::make_unique<SideThread>(
      "titan-lines", [ring = ring_] { ring->look(); }, kLook);
}

LifeLines::~LifeLines() = default;

std::optional<LifeLines::Loss> LifeLines::loss() const { return ring_ ? ring_->loss() : std::nullopt; }
bool LifeLines::are_laid() const { return !ring_ || ring_->are_laid(); }

}  // namespace titan::dist
