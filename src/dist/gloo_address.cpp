// Where gloo listens, so that the other ranks reach it.

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gloo_backend.h"

namespace titan::dist {
namespace {

std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> parts;
  size_t start = 0;
  for (size_t comma; (comma = text.find(',', start)) != std::string::npos; start = comma + 1) {
    parts.push_back(text.substr(start, comma - start));
  }
  parts.push_back(text.substr(start));
  return parts;
}

/// "127.0.0.1", or "::1" on a host that has no IPv4 at all.
std::string loopback_address() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const bool is_there = fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  if (fd >= 0) close(fd);
  return is_there ? "127.0.0.1" : "::1";
}

}  // namespace

std::string address_towards(const std::string& host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  std::string address;
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_in own{};
  socklen_t size = sizeof(own);
  // Connecting a datagram socket sends nothing; it only picks the route.
  if (fd >= 0 && connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
      (ntohl(own.sin_addr.s_addr) >> 24) != 127) {
    char text[INET_ADDRSTRLEN];
    address = inet_ntop(AF_INET, &own.sin_addr, text, sizeof(text));
  }
  if (fd >= 0) close(fd);
  freeaddrinfo(found);
  return address;
}

GlooAddress choose_gloo_address(const std::optional<std::string>& interfaces, bool one_host,
                                const std::string& other_host) {
  GlooAddress address;
  if (interfaces) address.interfaces = split_at_commas(*interfaces);
  address.address = one_host ? loopback_address() : address_towards(other_host);
  return address;
}

}  // namespace titan::dist
