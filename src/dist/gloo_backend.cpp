// Builds gloo process groups and chooses the network address that they listen on.

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dist/backends.h"
#include "dist/environment.h"

// LibTorch's header of the gloo backend is guarded by the macro that its own build sets.
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace titan::dist {
namespace {

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

/// Whether other hosts can use the address: a link-local one needs the name of their own interface.
bool is_for_others(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET)
    return (ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24) != 127;
  const in6_addr& bytes = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&bytes)) return bytes.s6_addr[12] != 127;
  return !IN6_IS_ADDR_LOOPBACK(&bytes) && !IN6_IS_ADDR_LINKLOCAL(&bytes);
}

// Connecting a datagram socket sends nothing; it only picks the route.
std::string own_address_towards(const addrinfo& there) {
  const int fd = socket(there.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return "";
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  char text[NI_MAXHOST] = "";
  if (connect(fd, there.ai_addr, there.ai_addrlen) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) == 0 && is_for_others(own))
    getnameinfo(reinterpret_cast<sockaddr*>(&own), size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  close(fd);
  return text;
}

using Gloo = c10d::ProcessGroupGloo;

auto make_devices(const GlooAddress& address) {
  decltype(Gloo::Options::devices) devices;
  for (const auto& interface : address.interfaces)
    devices.push_back(Gloo::createDeviceForInterface(interface));
  if (!devices.empty()) return devices;
  devices.push_back(address.address.empty() ? Gloo::createDefaultDevice()
                                            : Gloo::createDeviceForHostname(address.address));
  return devices;
}

}  // namespace

std::string address_towards(const std::string& host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  std::string address;
  for (const int family : {AF_INET, AF_INET6})
    for (const addrinfo* there = found; there && address.empty(); there = there->ai_next)
      if (there->ai_family == family) address = own_address_towards(*there);
  freeaddrinfo(found);
  return address;
}

GlooAddress choose_gloo_address(const std::optional<std::string>& interfaces, bool one_host,
                                const std::string& other_host) {
  GlooAddress address;
  if (interfaces)
    for (const auto name : split_list(*interfaces)) address.interfaces.emplace_back(name);
  address.address = one_host ? loopback_address() : address_towards(other_host);
  return address;
}

c10::intrusive_ptr<c10d::Backend> make_gloo_group(const GroupSpec& spec, const GlooAddress& address) {
  auto options = Gloo::Options::create(spec.timeout);
  options->devices = make_devices(address);
  // Calls of one group may overlap (a gather of the next layer, a reduction of the last): one thread for
  // each.
  options->threads = 2 * static_cast<int>(options->devices.size());
  return c10::make_intrusive<Gloo>(spec.store, spec.rank, spec.size, options);
}

}  // namespace titan::dist
