// How long ranks take to meet at the job's store (dist/rendezvous.h), on one machine.
//
//   rendezvous_bench [--ranks N]
//
// Rank 0 with its store is a process, and each other rank a thread of another one, so all share the machine's cores. Prints one JSON object: the
// seconds from the first rank's start until all of these have the addresses of all, and until half of them have.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dist/rendezvous.h"
#include "titan/core/error.h"

namespace {

using namespace titan;
using Clock = std::chrono::steady_clock;

struct Listener {
  int fd = -1, port = 0;
};

Listener listen_on_loopback() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(address);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  if (fd < 0 || bind(fd, any, bytes) != 0 || listen(fd, SOMAXCONN) != 0 || getsockname(fd, any, &bytes) != 0)
    throw Error("cannot listen on the loopback interface");
  return {fd, ntohs(address.sin_port)};
}

// An end of each rank's connection, and some for the process.
void allow_sockets(int num_ranks) {
  const rlim_t needed = static_cast<rlim_t>(num_ranks) + 100;
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur >= needed) return;
  limit = {.rlim_cur = needed, .rlim_max = std::max(limit.rlim_max, needed)};
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
    throw Error(str(num_ranks, " ranks need ", needed, " open files, which this process may not have"));
}

dist::Launch launch_of(int rank, int num_ranks, const Listener& listener) {
  return {.by = "env",
          .rank = rank,
          .size = num_ranks,
          .store_host = "127.0.0.1",
          .store_port = listener.port,
          .listen_fd = rank == 0 ? listener.fd : -1};
}

void meet_and_leave(const dist::Launch& launch, const std::function<void()>& on_met) {
  dist::Rendezvous result = dist::meet(launch, std::chrono::minutes(10));
  on_met();
  result.peers = {};  // 1.2 MB of each of 16,384 ranks
  dist::leave(*result.store, launch);
}

void measure_others(int num_ranks, const Listener& listener) {
  std::mutex mutex;
  std::vector<double> met;
  std::string error;
  std::vector<std::thread> ranks;
  const auto start = Clock::now();
  for (int rank = 1; rank < num_ranks; ++rank)
    ranks.emplace_back([&, rank] {
      try {
        meet_and_leave(launch_of(rank, num_ranks, listener), [&] {
          const std::lock_guard lock(mutex);
          met.push_back(std::chrono::duration<double>(Clock::now() - start).count());
        });
      } catch (const std::exception& caught) {
        const std::lock_guard lock(mutex);
        error = caught.what();
      }
    });
  for (std::thread& rank : ranks) rank.join();
  if (!error.empty()) throw Error(error);
  std::ranges::sort(met);
  std::cout << "{\"ranks\": " << num_ranks << ", \"half_s\": " << met[met.size() / 2]
            << ", \"all_s\": " << met.back() << "}\n";
}

void measure(int num_ranks) {
  allow_sockets(num_ranks);
  const Listener listener = listen_on_loopback();
  const pid_t first = fork();
  if (first < 0) throw Error("cannot start another process");
  if (first == 0) {
    meet_and_leave(launch_of(0, num_ranks, listener), [] {});
    return;
  }
  close(listener.fd);
  measure_others(num_ranks, listener);
  int status = 0;
  if (waitpid(first, &status, 0) != first || status != 0) throw Error("rank 0 failed");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    int num_ranks = 512;
    if (argc == 3 && std::string(argv[1]) == "--ranks")
      num_ranks = std::atoi(argv[2]);
    else if (argc > 1)
      throw Error("usage: rendezvous_bench [--ranks N]");
    if (num_ranks < 2 || num_ranks > 20000)
      throw Error(str("--ranks ", argv[2], ": 2 to 20000 are allowed: more have no ports to connect from"));
    measure(num_ranks);
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
}
