#include "guard/life_lines.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <random>
#include <sstream>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

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

/// The numeric address and port of a listening rank, and a word that no stranger knows.
struct Door {
  std::string address, port, word;
};

std::string to_text(const Door& door) { return str(door.address, " ", door.port, " ", door.word); }
Door door_from(const std::string& text) {
  Door door;
  std::istringstream(text) >> door.address >> door.port >> door.word;
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

/// A line to a neighbor.
struct Line {
  int rank = -1;
  Socket socket;
  bool is_over = false;
};

}  // namespace

class LifeLines::Ring {
 public:
  Ring(Mail::Connect connect, int rank, int size)
      : connect_(std::move(connect)),
        rank_(rank),
        next_{(rank + 1) % size, {}},
        previous_{(rank + size - 1) % size, {}} {}

  /// A turn of the thread. The store may block it.
  void look() {
    try {
      if (!listener_ && !was_refused_) open_door();
      if (listener_ && !next_.socket) call_next();
    } catch (const std::exception&) {
      store_ = nullptr;  // the next turn connects again
    }
    if (listener_ && !previous_.socket) accept_previous();
    for (Line* line : {&next_, &previous_}) read(*line);
  }

  std::optional<Loss> loss() const {
    const std::lock_guard lock(mutex_);
    return loss_;
  }
  bool are_laid() const { return num_laid_ == 2; }

 private:
  static std::string key_of(int rank) { return str("line/", rank); }

  c10d::Store* store() {
    if (!store_) store_ = connect_();
    return store_.get();
  }

  void open_door() {
    c10d::Store* const doors = store();
    if (!doors) return;
    const std::string towards = address_towards(host_of(*doors));
    own_ = {towards.empty() ? "127.0.0.1" : towards, "0",
            str(std::random_device()(), ".", std::random_device()())};
    auto address = numeric_address(own_.address, own_.port);
    Socket door = address ? make_socket(address->storage.ss_family, SOCK_NONBLOCK) : Socket();
    char port[NI_MAXSERV] = "";
    if (!door || bind(door.fd(), address->get(), address->size) != 0 || listen(door.fd(), 8) != 0 ||
        getsockname(door.fd(), reinterpret_cast<sockaddr*>(&address->storage), &address->size) != 0 ||
        getnameinfo(address->get(), address->size, nullptr, 0, port, sizeof port, NI_NUMERICSERV) != 0)
      return refuse(str("listen at ", own_.address));
    own_.port = port;
    doors->set(key_of(rank_), to_text(own_));
    listener_ = std::move(door);
  }

  void call_next() {
    c10d::Store* const doors = store();
    if (was_refused_ || !doors || !doors->check({key_of(next_.rank)})) return;
    const Door door = door_from(doors->get_to_str(key_of(next_.rank)));
    const auto address = numeric_address(door.address, door.port);
    Socket line = address ? make_socket(address->storage.ss_family, 0) : Socket();
    const timeval limit{2, 0};  // Linux applies it to connect(), too
    if (line) setsockopt(line.fd(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (!line || connect(line.fd(), address->get(), address->size) != 0 ||
        send(line.fd(), door.word.data(), door.word.size(), MSG_NOSIGNAL) !=
            static_cast<ssize_t>(door.word.size()))
      return refuse(str("connect to rank ", next_.rank, " at ", door.address, " port ", door.port));
    lay(next_, std::move(line));
    store_ = nullptr;
  }

  void lay(Line& line, Socket socket) {
    watch_host(socket);
    line.socket = std::move(socket);
    ++num_laid_;
  }

  // The word comes in one piece: it is shorter than any packet.
  void accept_previous() {
    if (!caller_) caller_ = Socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!caller_) return;
    std::string word(own_.word.size(), '\0');
    const ssize_t got = recv(caller_.fd(), word.data(), word.size(), 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    Socket caller = std::exchange(caller_, {});
    if (got < 0 || word != own_.word) return;
    lay(previous_, std::move(caller));
  }

  // Nobody writes to a line, so there is nothing to read but its end.
  void read(Line& line) {
    if (!line.socket || line.is_over) return;
    char byte = 0;
    const ssize_t got = recv(line.socket.fd(), &byte, 1, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    const std::string how = got >= 0 || errno == ECONNRESET ? "its process is gone"
                                                            : str("its host is gone: ", std::strerror(errno));
    line.is_over = true;
    if (has_reported_its_end(line.rank)) return;
    const std::lock_guard lock(mutex_);
    if (!loss_) loss_ = Loss{line.rank, how};
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

  // Without a line, a lost neighbor is noticed when its beats don't arrive.
  void refuse(const std::string& what) {
    const int error = errno;
    was_refused_ = true;
    if (has_reported_its_end(next_.rank)) return;
    log::warning(str("the watchdog can't ", what, ": ", std::strerror(error),
                     "; a loss of the neighboring rank is noticed later"));
  }

  const Mail::Connect connect_;
  const int rank_;
  StorePtr store_;  // while it is needed
  Door own_;
  Socket listener_, caller_;
  bool was_refused_ = false;
  Line next_, previous_;
  std::atomic<int> num_laid_{0};

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
