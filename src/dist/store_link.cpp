#include "store_link.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <exception>
#include <string>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace titan::dist {

namespace {

bool takes_connection(const addrinfo& address) {
  const int fd = socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, address.ai_protocol);
  if (fd < 0) return false;
  const timeval limit{2, 0};  // Linux has connect() keep to it too
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  const bool taken = connect(fd, address.ai_addr, address.ai_addrlen) == 0;
  close(fd);
  return taken;
}

bool is_served(const std::string& host, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return false;
  bool taken = false;
  for (const auto* address = found; address && !taken; address = address->ai_next)
    taken = takes_connection(*address);
  freeaddrinfo(found);
  return taken;
}

// Of a prefix's store, which may have one too.
c10d::Store& served_store(c10d::Store& store) {
  auto* prefix = dynamic_cast<c10d::PrefixStore*>(&store);
  return prefix ? *prefix->getUnderlyingNonPrefixStore() : store;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> connect_again(c10d::Store& store) {
  try {
    const auto* server = dynamic_cast<const c10d::TCPStore*>(&served_store(store));
    if (server && !is_served(server->getHost(), server->getPort())) return {};
    return store.clone();
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace titan::dist
