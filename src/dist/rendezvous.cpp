// [Note: names of peers]
//
// Every connection that LibTorch makes to a store asks for the name of the other side, for messages that
// mostly nobody prints. No local file knows 127.0.0.1 as it is written there (::ffff:127.0.0.1), so even on
// one host a name server is asked, and where that doesn't answer, a connection takes 5 s or 10
// (github.com/pytorch/pytorch/issues/159007). There is no setting for it. So this stands in front of libc's
// getnameinfo: LibTorch gets the address as it is; everybody else's calls go on to libc as they are.

#include "dist/rendezvous.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <fstream>
#include <random>
#include <sstream>
#include <string_view>
#include <thread>

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "dist/backends.h"
#include "titan/core/error.h"

namespace titan::dist {

int name_flags(const void* code, int flags) {
  Dl_info library{};
  if (::dladdr(code, &library) == 0 || !library.dli_fname) return flags;
  const std::string_view path = library.dli_fname;
  return path.substr(path.rfind('/') + 1).starts_with("libtorch") ? flags | NI_NUMERICHOST : flags;
}

}  // namespace titan::dist

extern "C" __attribute__((visibility("default"))) int getnameinfo(const sockaddr* address,
                                                                  socklen_t address_bytes, char* host,
                                                                  socklen_t host_bytes, char* service,
                                                                  socklen_t service_bytes, int flags) {
  using Call = decltype(&getnameinfo);
  static const auto libc = reinterpret_cast<Call>(::dlsym(RTLD_NEXT, "getnameinfo"));
  if (!libc) return EAI_SYSTEM;
  return libc(address, address_bytes, host, host_bytes, service, service_bytes,
              titan::dist::name_flags(__builtin_return_address(0), flags));
}

namespace titan::dist {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

std::string host_identity() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return str(name, "/", boot);
}

double seconds(Milliseconds time) { return static_cast<double>(time.count()) / 1000; }

/// c10d prints a stack trace for every time-out that we turn into a message of our own.
class QuietC10d {
 public:
  QuietC10d() : before_(FLAGS_caffe2_log_level) { FLAGS_caffe2_log_level = c10::GLOG_FATAL; }
  ~QuietC10d() { FLAGS_caffe2_log_level = before_; }
  QuietC10d(const QuietC10d&) = delete;

 private:
  int before_;
};

Milliseconds time_left(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<Milliseconds>(deadline - Clock::now());
  return std::max(left, Milliseconds(1));
}

bool accepts_connection(const Launch& launch) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(launch.store_host.c_str(), std::to_string(launch.store_port).c_str(), &hints, &found) != 0)
    return false;
  bool accepted = false;
  for (auto* address = found; address && !accepted; address = address->ai_next) {
    const int fd = socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC, address->ai_protocol);
    if (fd < 0) continue;
    accepted = connect(fd, address->ai_addr, address->ai_addrlen) == 0;
    close(fd);
  }
  freeaddrinfo(found);
  return accepted;
}

/// c10d's client waits up to a second between its tries; ranks start within milliseconds of each other.
bool wait_for_server(const Launch& launch, Clock::time_point deadline) {
  auto pause = Milliseconds(2);
  while (!accepts_connection(launch)) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::min(pause, time_left(deadline)));
    pause = std::min(pause * 2, Milliseconds(100));
  }
  return true;
}

std::string where(const Launch& launch) { return str(launch.store_host, ":", launch.store_port); }

std::string no_store(const Launch& launch, Milliseconds timeout) {
  return str("rank ", launch.rank, " of ", launch.size, " found no store at ", where(launch), " within ",
             seconds(timeout), " s, missing: 0 (rank 0 serves it; are MASTER_ADDR and MASTER_PORT its own?)");
}

// [Note: torchrun's store]
// The agent's store outlives the ranks that it restarts, and so do their keys; nor do the agents of several
// hosts count restarts alike. So that store is a notice board: rank 0, which runs on the same host, serves
// one of its own and writes up the port. A port that an earlier rank 0 wrote up is found closed, since agents
// end all ranks before they start new ones; or taken by somebody else by now, which may be another job of
// ours with the same keys. So there stands a number beside it that only the right store has, too.
constexpr const char* kOwnPort = "titan/port";
constexpr const char* kOwnNumber = "own_number";

StorePtr open_agent_store(const Launch& launch, Milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(launch.store_port);
  options.waitWorkers = false;
  options.timeout = timeout;
  return c10::make_intrusive<c10d::TCPStore>(launch.store_host, options);
}

StorePtr serve_and_tell(const Launch& launch, Milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.numWorkers = launch.size;
  options.waitWorkers = false;
  options.timeout = timeout;
  auto server = c10::make_intrusive<c10d::TCPStore>(launch.store_host, options);
  const auto port = server->getPort();
  auto store = c10::make_intrusive<c10d::PrefixStore>("titan", std::move(server));
  std::random_device source;
  const std::string number = str(source(), "-", source());
  store->set(kOwnNumber, number);
  open_agent_store(launch, timeout)->set(kOwnPort, str(port, " ", number));
  return store;
}

/// Null: nobody listens there, or not the store that has this number.
StorePtr open_numbered_store(const Launch& launch, const std::string& number, Clock::time_point deadline) {
  if (!accepts_connection(launch)) return nullptr;
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(launch.store_port);
  options.numWorkers = launch.size;
  options.waitWorkers = false;
  options.timeout = std::min(Milliseconds(5000), time_left(deadline));
  try {
    StorePtr store = c10::make_intrusive<c10d::PrefixStore>(
        "titan", c10::make_intrusive<c10d::TCPStore>(launch.store_host, options));
    const bool is_it = store->check({kOwnNumber}) && store->get_to_str(kOwnNumber) == number;
    return is_it ? store : nullptr;
  } catch (const c10::Error&) {
    return nullptr;  // no store at all
  }
}

/// That of this start's rank 0, once it is there; what is written up may be another's until then.
StorePtr open_written_up(const Launch& launch, Milliseconds timeout, Clock::time_point deadline) {
  const StorePtr board = open_agent_store(launch, timeout);
  Launch found = launch;
  while (true) {
    if (board->check({kOwnPort})) {
      std::string number;
      std::istringstream(board->get_to_str(kOwnPort)) >> found.store_port >> number;
      if (StorePtr store = open_numbered_store(found, number, deadline)) {
        store->setTimeout(timeout);
        return store;
      }
    }
    if (Clock::now() >= deadline) throw Error(no_store(launch, timeout));
    std::this_thread::sleep_for(std::min(Milliseconds(20), time_left(deadline)));
  }
}

StorePtr open_store(const Launch& launch, Milliseconds timeout, Clock::time_point deadline) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(launch.store_port);
  options.isServer = launch.rank == 0;
  options.numWorkers = launch.size;
  options.waitWorkers = false;  // whoever doesn't come is to be named: see wait_until_ready
  options.timeout = timeout;
  if (options.isServer && launch.listen_fd >= 0) {
    fcntl(launch.listen_fd, F_SETFD, FD_CLOEXEC);
    options.masterListenFd = launch.listen_fd;
  }
  if (!options.isServer && !wait_for_server(launch, deadline)) throw Error(no_store(launch, timeout));
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(launch.store_host, options);
    return c10::make_intrusive<c10d::PrefixStore>("titan", std::move(store));
  } catch (const c10::Error& error) {
    if (!options.isServer) throw Error(str(no_store(launch, timeout), ": ", reason_of(error)));
    throw Error(str("rank 0 can't serve the store at ", where(launch),
                    " (is the port taken? set another MASTER_PORT on all ranks): ", reason_of(error)));
  }
}

StorePtr open_by_agent(const Launch& launch, Milliseconds timeout, Clock::time_point deadline) {
  try {
    return launch.rank == 0 ? serve_and_tell(launch, timeout) : open_written_up(launch, timeout, deadline);
  } catch (const c10::Error& error) {
    throw Error(str("rank ", launch.rank, " of ", launch.size, " lost the store of torchrun's agent at ",
                    where(launch), ": ", reason_of(error)));
  }
}

std::string key_of(int rank) { return str("rank/", rank); }

// One key ends the waiting of all: the last rank to come sets it to "ok", and whoever finds that the job
// can't come together sets it to the reason, so that every rank says the same.
constexpr const char* kVerdict = "verdict";
constexpr const char* kOk = "ok";

void condemn(c10d::Store& store, const Launch& launch, const std::string& reason) {
  store.set(kVerdict, reason);
  // The server's process is about to end, and the store with it.
  if (launch.rank == 0) std::this_thread::sleep_for(Milliseconds(500));
}

/// What is wrong with this rank's coming, "" if nothing.
std::string register_rank(c10d::Store& store, const Launch& launch) {
  const std::string size = std::to_string(launch.size);
  const std::string agreed = store.compareSet("world_size", "", str(size, " ", launch.rank));
  if (std::stoi(agreed) != launch.size) {
    return str("rank ", launch.rank, " was told a world of ", launch.size, ", rank ",
               agreed.substr(agreed.find(' ') + 1), " one of ", std::stoi(agreed),
               ": WORLD_SIZE has to be the same on all ranks");
  }
  const auto claims = store.add(str("claims/", launch.rank), 1);
  if (claims > 1) {
    return str(claims, " processes claim to be rank ", launch.rank, " of ", launch.size,
               ": each needs a RANK of its own");
  }
  store.set(key_of(launch.rank), str(host_identity(), " ", address_towards(launch.store_host)));
  if (store.add("num_ranks", 1) == launch.size) store.set(kVerdict, kOk);
  return "";
}

std::string list_ranks(const std::vector<int>& ranks) {
  constexpr size_t most = 32;
  std::string text;
  for (size_t i = 0; i < std::min(most, ranks.size()); ++i) text += str(i ? ", " : "", ranks[i]);
  return ranks.size() > most ? str(text, ", ... (", ranks.size(), " in all)") : text;
}

std::string missing_peers(c10d::Store& store, const Launch& launch, Milliseconds timeout) {
  std::vector<int> missing;
  for (int rank = 0; rank < launch.size; ++rank) {
    if (!store.check({key_of(rank)})) missing.push_back(rank);
  }
  return str(missing.size(), " of ", launch.size, " ranks didn't come to ", where(launch), " within ",
             seconds(timeout), " s, missing: ", list_ranks(missing));
}

void wait_until_ready(c10d::Store& store, const Launch& launch, Milliseconds timeout,
                      Clock::time_point deadline) {
  try {
    store.wait({kVerdict}, time_left(deadline));
  } catch (const c10::Error&) {
    if (!store.check({kVerdict})) {
      const std::string reason = missing_peers(store, launch, timeout);
      condemn(store, launch, reason);
      throw Error(reason);
    }
  }
  const std::string verdict = store.get_to_str(kVerdict);
  if (verdict != kOk) throw Error(verdict);
}

std::vector<Peer> read_peers(c10d::Store& store, const Launch& launch) {
  std::vector<std::string> keys;
  keys.reserve(static_cast<size_t>(launch.size));
  for (int rank = 0; rank < launch.size; ++rank) keys.push_back(key_of(rank));
  std::vector<Peer> peers;
  for (const auto& value : store.multiGet(keys)) {
    const std::string text(value.begin(), value.end());
    const size_t space = text.rfind(' ');
    peers.push_back({.host = text.substr(0, space), .address = text.substr(space + 1)});
  }
  return peers;
}

}  // namespace

StorePtr make_private_store() { return c10::make_intrusive<c10d::HashStore>(); }

Rendezvous meet(const Launch& launch, Milliseconds timeout) {
  if (launch.size == 1) return {make_private_store(), {Peer{.host = host_identity(), .address = ""}}};
  const QuietC10d quiet;
  const auto deadline = Clock::now() + timeout;
  Rendezvous result;
  result.store =
      !launch.serves_store ? open_by_agent(launch, timeout, deadline) : open_store(launch, timeout, deadline);
  try {
    const std::string problem = register_rank(*result.store, launch);
    if (!problem.empty()) {
      condemn(*result.store, launch, problem);
      throw ConfigError(problem);
    }
    wait_until_ready(*result.store, launch, timeout, deadline);
    result.peers = read_peers(*result.store, launch);
  } catch (const c10::Error& error) {
    throw Error(str("rank ", launch.rank, " lost the store of rank 0 at ", where(launch),
                    " while waiting for the others: ", reason_of(error)));
  }
  return result;
}

void leave(c10d::Store& store, const Launch& launch) {
  if (launch.size == 1) return;
  try {
    store.add("left", 1);
    if (launch.rank != 0) return;
    const auto deadline = Clock::now() + std::chrono::seconds(5);
    while (store.add("left", 0) < launch.size && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  } catch (const std::exception&) {
    // The store is gone: then so is its server, and nobody waits for us.
  }
}

}  // namespace titan::dist
