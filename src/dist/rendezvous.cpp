// [Note: rendezvous]
// The ranks meet at a c10d store, which rank 0 serves and the others connect to. Each registers its rank, its
// host and the host's address; the last one writes the list of all, and declares the rendezvous complete. A rank that finds that the job can't
// start declares the reason instead, so that every rank reports the same.

#include "dist/rendezvous.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <random>
#include <span>
#include <sstream>
#include <string_view>
#include <thread>

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/process.h"
#include "dist/backends.h"
#include "titan/core/error.h"

namespace titan::dist {

namespace {

bool accepts_connection(const addrinfo& address) {
  const int fd = socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, address.ai_protocol);
  if (fd < 0) return false;
  const timeval limit{2, 0};  // Linux applies it to connect(), too
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  const bool accepted = connect(fd, address.ai_addr, address.ai_addrlen) == 0;
  close(fd);
  return accepted;
}

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

double seconds(Milliseconds time) { return static_cast<double>(time.count()) / 1000; }

/// Silences c10d, which prints a stack trace for every time-out that is reported here anyway.
class QuietC10d {
 public:
  QuietC10d() : before_(FLAGS_caffe2_log_level) { FLAGS_caffe2_log_level = c10::GLOG_FATAL; }
  ~QuietC10d() { FLAGS_caffe2_log_level = before_; }
  QuietC10d(const QuietC10d&) = delete;

 private:
  int before_;
};

/// How long to wait for the others.
struct Wait {
  Milliseconds timeout;
  Clock::time_point deadline = Clock::now() + timeout;

  bool is_over() const { return Clock::now() >= deadline; }
  Milliseconds left() const {
    return std::max(std::chrono::duration_cast<Milliseconds>(deadline - Clock::now()), Milliseconds(1));
  }
  void sleep(Milliseconds time) const { std::this_thread::sleep_for(std::min(time, left())); }
};

/// c10d's client waits up to a second between its tries; this waits less, because ranks start within
/// milliseconds of each other.
bool wait_for_server(const Launch& launch, const Wait& wait) {
  auto pause = Milliseconds(2);
  while (!accepts_connections(launch.store_host, launch.store_port)) {
    if (wait.is_over()) return false;
    wait.sleep(pause);
    pause = std::min(pause * 2, Milliseconds(100));
  }
  return true;
}

std::string where(const Launch& launch) { return str(launch.store_host, ":", launch.store_port); }

std::string no_store(const Launch& launch, const Wait& wait) {
  return str("rank ", launch.rank, " of ", launch.size, " found no store at ", where(launch), " within ",
             seconds(wait.timeout),
             " s, missing: 0 (rank 0 serves it; do MASTER_ADDR and MASTER_PORT name rank 0's host?)");
}

// The store's constructor doesn't wait for the other ranks: wait_until_ready names the missing ones.
c10d::TCPStoreOptions store_options(const Launch& launch, int port, Milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.numWorkers = launch.size;
  options.waitWorkers = false;
  options.timeout = timeout;
  return options;
}

StorePtr with_prefix(c10::intrusive_ptr<c10d::TCPStore> store) {
  return c10::make_intrusive<c10d::PrefixStore>("titan", std::move(store));
}

// [Note: torchrun's store]
// The agent's store and the ranks' keys in it outlive the ranks that the agent restarts, and the agents of
// several hosts don't count restarts alike. So that store is only a notice board: rank 0, which runs on the
// same host, serves a store of its own and posts its port. A port that an earlier rank 0 posted is closed,
// since agents end all ranks before they start new ones. Or another process has taken it since, perhaps of
// another job with the same keys. So rank 0 also posts a number that only the right store contains.
constexpr const char* kOwnPort = "titan/port";
constexpr const char* kOwnNumber = "own_number";

StorePtr open_agent_store(const Launch& launch, const Wait& wait) {
  auto options = store_options(launch, launch.store_port, wait.timeout);
  options.numWorkers = std::nullopt;
  return c10::make_intrusive<c10d::TCPStore>(launch.store_host, options);
}

StorePtr serve_and_post(const Launch& launch, const Wait& wait) {
  auto options = store_options(launch, 0, wait.timeout);
  options.isServer = true;
  auto server = c10::make_intrusive<c10d::TCPStore>(launch.store_host, options);
  const auto port = server->getPort();
  auto store = with_prefix(std::move(server));
  std::random_device source;
  const std::string number = str(source(), "-", source());
  store->set(kOwnNumber, number);
  open_agent_store(launch, wait)->set(kOwnPort, str(port, " ", number));
  return store;
}

/// Returns null unless the store with this number listens there.
StorePtr open_numbered_store(const Launch& launch, int port, const std::string& number, const Wait& wait) {
  if (!accepts_connections(launch.store_host, port)) return nullptr;
  const auto options = store_options(launch, port, std::min(Milliseconds(5000), wait.left()));
  try {
    StorePtr store = with_prefix(c10::make_intrusive<c10d::TCPStore>(launch.store_host, options));
    const bool is_it = store->check({kOwnNumber}) && store->get_to_str(kOwnNumber) == number;
    return is_it ? store : nullptr;
  } catch (const c10::Error&) {
    return nullptr;  // not a store at all
  }
}

/// Opens the store of the current rank 0. Until it exists, the posted port may be an earlier rank 0's.
StorePtr open_posted_store(const Launch& launch, const Wait& wait) {
  const StorePtr board = open_agent_store(launch, wait);
  while (true) {
    if (board->check({kOwnPort})) {
      int port = 0;
      std::string number;
      std::istringstream(board->get_to_str(kOwnPort)) >> port >> number;
      if (StorePtr store = open_numbered_store(launch, port, number, wait)) {
        store->setTimeout(wait.timeout);
        return store;
      }
    }
    if (wait.is_over()) throw Error(no_store(launch, wait));
    wait.sleep(Milliseconds(20));
  }
}

StorePtr open_own_store(const Launch& launch, const Wait& wait) {
  auto options = store_options(launch, launch.store_port, wait.timeout);
  options.isServer = launch.rank == 0;
  if (options.isServer && launch.listen_fd >= 0) {
    fcntl(launch.listen_fd, F_SETFD, FD_CLOEXEC);
    options.masterListenFd = launch.listen_fd;
  }
  if (!options.isServer && !wait_for_server(launch, wait)) throw Error(no_store(launch, wait));
  try {
    return with_prefix(c10::make_intrusive<c10d::TCPStore>(launch.store_host, options));
  } catch (const c10::Error& error) {
    if (!options.isServer) throw Error(str(no_store(launch, wait), ": ", first_line_of(error)));
    throw Error(str("rank 0 can't serve the store at ", where(launch),
                    " (is the port taken? set another MASTER_PORT on all ranks): ", first_line_of(error)));
  }
}

StorePtr open_store(const Launch& launch, const Wait& wait) {
  if (launch.serves_store) return open_own_store(launch, wait);
  try {
    return launch.rank == 0 ? serve_and_post(launch, wait) : open_posted_store(launch, wait);
  } catch (const c10::Error& error) {
    throw Error(str("rank ", launch.rank, " of ", launch.size, " lost the store of torchrun's agent at ",
                    where(launch), ": ", first_line_of(error)));
  }
}

std::string key_of(int rank) { return str("rank/", rank); }

// All ranks wait for this key. Its value is kOk, or the reason why the job can't start.
constexpr const char* kVerdict = "verdict";
constexpr const char* kOk = "ok";
constexpr const char* kDescriptions = "descriptions";

/// Returns the verdict, which is the first one that a rank gave.
std::string settle(c10d::Store& store, const std::string& verdict) {
  const std::vector<uint8_t> settled =
      store.compareSet(kVerdict, {}, std::vector<uint8_t>(verdict.begin(), verdict.end()));
  return {settled.begin(), settled.end()};
}

void condemn(c10d::Store& store, const Launch& launch, const std::string& reason) {
  settle(store, reason);
  // The others need time to read it: this process serves the store and is about to end.
  if (launch.rank == 0) std::this_thread::sleep_for(Milliseconds(500));
}

// [Note: descriptions of peers]
// N ranks that read N keys are N * N reads of one process: with 2,048 ranks, half a minute. So the last rank to register reads them all, and
// writes one value: for each run of ranks with the same description, as those of a host have, a line with their number.

std::string descriptions_of_all(c10d::Store& store, int num_ranks) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < num_ranks; ++rank) keys.push_back(key_of(rank));
  std::string text, last;
  int count = 0;
  const auto add_run = [&] {
    if (count > 0) text += str(count, " ", last, "\n");
  };
  for (const auto& value : store.multiGet(keys)) {
    const std::string description(value.begin(), value.end());
    if (description != last) {
      add_run();
      last = description;
      count = 0;
    }
    ++count;
  }
  add_run();
  return text;
}

/// Returns the problem with this rank, or "".
std::string register_rank(c10d::Store& store, const Launch& launch) {
  const std::string size = std::to_string(launch.size);
  const std::string agreed = store.compareSet("world_size", "", str(size, " ", launch.rank));
  if (std::stoi(agreed) != launch.size) {
    return str("rank ", launch.rank, " has WORLD_SIZE ", launch.size, ", rank ",
               agreed.substr(agreed.find(' ') + 1), " has ", std::stoi(agreed),
               ": set the same on all ranks");
  }
  const auto claims = store.add(str("claims/", launch.rank), 1);
  if (claims > 1) {
    return str(claims, " processes claim to be rank ", launch.rank, " of ", launch.size,
               ": each needs a RANK of its own");
  }
  store.set(key_of(launch.rank), str(host_identity(), " ", address_towards(launch.store_host)));
  if (store.add("num_ranks", 1) == launch.size) {
    store.set(kDescriptions, descriptions_of_all(store, launch.size));
    settle(store, kOk);
  }
  return "";
}

std::string list_missing(const std::vector<int>& ranks) {
  constexpr size_t most = 32;
  const std::string text = list_str(std::span(ranks).first(std::min(most, ranks.size())));
  return ranks.size() > most ? str(text, ", ... (", ranks.size(), " in all)") : text;
}

std::string missing_peers(c10d::Store& store, const Launch& launch, const Wait& wait) {
  std::vector<int> missing;
  for (int rank = 0; rank < launch.size; ++rank)
    if (!store.check({key_of(rank)})) missing.push_back(rank);
  if (missing.empty())
    return str("all ", launch.size, " ranks connected to ", where(launch), ", but within ",
               seconds(wait.timeout), " s the last one didn't list them");
  return str(missing.size(), " of ", launch.size, " ranks didn't connect to ", where(launch), " within ",
             seconds(wait.timeout), " s, missing: ", list_missing(missing));
}

void wait_until_ready(c10d::Store& store, const Launch& launch, const Wait& wait) {
  try {
    store.wait({kVerdict}, wait.left());
  } catch (const c10::Error&) {
    if (!store.check({kVerdict})) condemn(store, launch, missing_peers(store, launch, wait));
  }
  const std::string verdict = store.get_to_str(kVerdict);
  if (verdict != kOk) throw Error(verdict);
}

std::vector<Peer> read_peers(c10d::Store& store, const Launch& launch) {
  std::vector<Peer> peers;
  std::istringstream lines(store.get_to_str(kDescriptions));
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(' '), last = line.rfind(' ');
    const Peer peer{.host = line.substr(first + 1, last - first - 1), .address = line.substr(last + 1)};
    peers.insert(peers.end(), std::stoul(line.substr(0, first)), peer);
  }
  TITAN_INTERNAL_ASSERT(peers.size() == static_cast<size_t>(launch.size), "the store describes ",
                        peers.size(), " of ", launch.size, " ranks");
  return peers;
}

}  // namespace

bool accepts_connections(const std::string& host, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return false;
  bool accepted = false;
  for (const auto* address = found; address && !accepted; address = address->ai_next)
    accepted = accepts_connection(*address);
  freeaddrinfo(found);
  return accepted;
}

StorePtr make_private_store() { return c10::make_intrusive<c10d::HashStore>(); }

Rendezvous meet(const Launch& launch, Milliseconds timeout) {
  if (launch.size == 1) return {make_private_store(), {Peer{.host = host_identity(), .address = ""}}};
  const QuietC10d quiet;
  const Wait wait{timeout};
  Rendezvous result;
  result.store = open_store(launch, wait);
  try {
    const std::string problem = register_rank(*result.store, launch);
    if (!problem.empty()) {
      condemn(*result.store, launch, problem);
      throw ConfigError(problem);
    }
    wait_until_ready(*result.store, launch, wait);
    result.peers = read_peers(*result.store, launch);
  } catch (const c10::Error& error) {
    throw Error(str("rank ", launch.rank, " lost the store of rank 0 at ", where(launch),
                    " while waiting for the others: ", first_line_of(error)));
  }
  return result;
}

void wait_for_all_at_end(c10d::Store& store, const Launch& launch) {
  if (launch.size == 1) return;
  try {
    if (store.add("at_end", 1) == launch.size) store.set("all_at_end", std::string("1"));
    store.wait({"all_at_end"}, Milliseconds(5000));
  } catch (const std::exception&) {  // a rank ended in another way
  }
}

void leave(c10d::Store& store, const Launch& launch) {
  if (launch.size == 1) return;
  try {
    store.add("left", 1);
    if (launch.rank != 0) return;
    const Wait wait{Milliseconds(5000)};
    while (store.add("left", 0) < launch.size && !wait.is_over()) wait.sleep(Milliseconds(2));
  } catch (const std::exception&) {
    // The store is gone: then so is its server, and nobody waits for us.
  }
}

// [Note: names of peers]
// Every connection that LibTorch makes to a store asks for the name of the other side, for messages that are
// hardly ever printed. No local file knows 127.0.0.1 as it is written there (::ffff:127.0.0.1), so even on
// one host a name server is asked, and if it doesn't answer, a connection takes 5 or 10 s
// (github.com/pytorch/pytorch/issues/159007). There is no setting for it. So this function replaces libc's
// getnameinfo: LibTorch gets addresses instead of names; all other calls reach libc unchanged.
// The linker takes the first one that it finds. libtitan has one, too, because libc comes before libtitan_train in a
// program that links only libtitan.

namespace {

// dladdr() also looks for the nearest symbol, which takes half a millisecond in LibTorch's libraries: a third of a rank's rendezvous, and most of
// the time of the thread that serves the store. There are only a few callers.
bool is_in_libtorch(const void* code) {
  static std::mutex mutex;
  static auto& known =
      *new std::map<const void*, bool>;  // the store's thread may outlive this library's variables
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = known.try_emplace(code, false);
  Dl_info library{};
  if (is_new && ::dladdr(code, &library) != 0 && library.dli_fname) {
    const std::string_view path = library.dli_fname;
    found->second = path.substr(path.rfind('/') + 1).starts_with("libtorch");
  }
  return found->second;
}

}  // namespace

int name_flags(const void* code, int flags) { return is_in_libtorch(code) ? flags | NI_NUMERICHOST : flags; }

int name_of_peer(const void* caller, const NameQuery& query) {
  using Call = decltype(&getnameinfo);
  static const auto libc =
      reinterpret_cast<Call>(::dlsym(::dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD), "getnameinfo"));
  if (!libc) return EAI_SYSTEM;
  return libc(query.address, query.address_bytes, query.host, query.host_bytes, query.service,
              query.service_bytes, name_flags(caller, query.flags));
}

}  // namespace titan::dist

extern "C" __attribute__((visibility("default"))) int getnameinfo(const sockaddr* address,
                                                                  socklen_t address_bytes, char* host,
                                                                  socklen_t host_bytes, char* service,
                                                                  socklen_t service_bytes, int flags) {
  return titan::dist::name_of_peer(__builtin_return_address(0),
                                   {address, address_bytes, host, host_bytes, service, service_bytes, flags});
}
