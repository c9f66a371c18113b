#include "rendezvous.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "titan/core/error.h"

namespace titan::dist {
namespace {

using Clock = std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

std::string host_identity() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return str(name, "/", boot);
}

double seconds(std::chrono::milliseconds time) { return static_cast<double>(time.count()) / 1000; }

std::string reason_of(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return text.substr(0, text.find('\n'));
}

StorePtr open_store(const Launch& launch, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(launch.store_port);
  options.isServer = launch.serves_store && launch.rank == 0;
  options.numWorkers = launch.size;
  options.waitWorkers = false;  // whoever doesn't come is to be named: see wait_for_peers
  options.timeout = timeout;
  if (options.isServer && launch.listen_fd >= 0) {
    fcntl(launch.listen_fd, F_SETFD, FD_CLOEXEC);
    options.masterListenFd = launch.listen_fd;
  }
  const std::string where = str(launch.store_host, ":", launch.store_port);
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(launch.store_host, options);
    return c10::make_intrusive<c10d::PrefixStore>(launch.store_prefix + "titan", std::move(store));
  } catch (const c10::Error& error) {
    if (options.isServer) {
      throw Error(str("rank 0 can't serve the store at ", where,
                      " (is the port taken? set another MASTER_PORT on all ranks): ", reason_of(error)));
    }
    throw Error(str("rank ", launch.rank, " of ", launch.size, " found no store at ", where, " within ",
                    seconds(timeout),
                    " s: rank 0 is missing, or MASTER_ADDR and MASTER_PORT aren't its: ", reason_of(error)));
  }
}

std::string key_of(int rank) { return str("rank/", rank); }

void register_rank(c10d::Store& store, const Launch& launch) {
  const auto claims = store.add(str("claims/", launch.rank), 1);
  if (claims > 1) {
    throw ConfigError(str(claims, " processes claim to be rank ", launch.rank, " of ", launch.size,
                          ": each needs a RANK of its own"));
  }
  store.set(key_of(launch.rank), str(launch.size, " ", host_identity()));
}

std::string list_ranks(const std::vector<int>& ranks) {
  constexpr size_t most = 32;
  std::string text;
  for (size_t i = 0; i < std::min(most, ranks.size()); ++i) text += str(i ? ", " : "", ranks[i]);
  return ranks.size() > most ? str(text, ", ... (", ranks.size(), " in all)") : text;
}

std::vector<int> missing_ranks(c10d::Store& store, int size) {
  std::vector<int> missing;
  for (int rank = 0; rank < size; ++rank) {
    if (!store.check({key_of(rank)})) missing.push_back(rank);
  }
  return missing;
}

/// As long as somebody's world is smaller or larger than ours, waiting for the rest is in vain.
void check_size(const Launch& launch, int rank, const Peer& peer) {
  if (peer.size == launch.size) return;
  throw ConfigError(str("rank ", launch.rank, " was told a world of ", launch.size, ", rank ", rank,
                        " one of ", peer.size, ": WORLD_SIZE has to be the same on all ranks"));
}

Peer read_peer(c10d::Store& store, int rank) {
  const std::string text = store.get_to_str(key_of(rank));
  const size_t space = text.find(' ');
  return {text.substr(space + 1), std::stoi(text.substr(0, space))};
}

void wait_for_peers(c10d::Store& store, const Launch& launch, std::chrono::milliseconds timeout) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < launch.size; ++rank) keys.push_back(key_of(rank));
  try {
    store.wait(keys, timeout);
  } catch (const c10::Error& error) {
    std::vector<int> missing;
    try {
      missing = missing_ranks(store, launch.size);
      if (missing.empty()) return;
      for (int rank = 0; rank < launch.size; ++rank) {
        if (store.check({key_of(rank)})) check_size(launch, rank, read_peer(store, rank));
      }
    } catch (const c10::Error& lost) {
      throw Error(str("rank ", launch.rank, " lost the store of rank 0 at ", launch.store_host, ":",
                      launch.store_port, " while waiting for the others: ", reason_of(lost)));
    }
    throw Error(str(missing.size(), " of ", launch.size, " ranks didn't come within ", seconds(timeout),
                    " s, missing: ", list_ranks(missing), ". Rank ", launch.rank, " waited at ",
                    launch.store_host, ":", launch.store_port, " (launched by ", launch.by, ")"));
  }
}

}  // namespace

StorePtr make_private_store() { return c10::make_intrusive<c10d::HashStore>(); }

Rendezvous meet(const Launch& launch, std::chrono::milliseconds timeout) {
  if (launch.size == 1) return {make_private_store(), {Peer{host_identity(), 1}}};
  const auto deadline = Clock::now() + timeout;
  Rendezvous result;
  result.store = open_store(launch, timeout);
  register_rank(*result.store, launch);
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  wait_for_peers(*result.store, launch, std::max(left, std::chrono::milliseconds(100)));
  for (int rank = 0; rank < launch.size; ++rank) {
    result.peers.push_back(read_peer(*result.store, rank));
    check_size(launch, rank, result.peers.back());
  }
  return result;
}

void leave(c10d::Store& store, const Launch& launch) {
  if (launch.size == 1) return;
  try {
    store.add("left", 1);
    if (!launch.serves_store || launch.rank != 0) return;
    const auto deadline = Clock::now() + std::chrono::seconds(5);
    while (store.add("left", 0) < launch.size && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  } catch (const std::exception&) {
    // The store is gone: then so is its server, and nobody waits for us.
  }
}

}  // namespace titan::dist
