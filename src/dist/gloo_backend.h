#pragma once

// Groups over TCP sockets on the CPU, by the gloo inside LibTorch.

#include <optional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "titan/dist/device_backend.h"

namespace titan::dist {

/// Where gloo listens. Exactly one of the two is used: interfaces if any are named, else the address.
struct GlooAddress {
  std::vector<std::string> interfaces;  ///< "eth0"; several: traffic is spread over them
  std::string address;  ///< host name or IP of this process that the others reach; "" = by host name
};

/// The address of this host on the route to `host`, of IPv4 where there is one, else of IPv6; "" when it
/// can't be told or is of no use to other hosts: a loopback or link-local one. A host name often resolves to
/// 127.0.1.1 on its own host, which nobody else can reach.
std::string address_towards(const std::string& host);

/// `interfaces`: the value of GLOO_SOCKET_IFNAME. Without it, loopback when all ranks are on one host, else
/// this host's address on the route to `other_host`.
GlooAddress choose_gloo_address(const std::optional<std::string>& interfaces, bool one_host,
                                const std::string& other_host);

/// Connects to all members (blocks). Threads of the group end when the last reference goes.
c10::intrusive_ptr<c10d::Backend> make_gloo_group(const GroupSpec& spec, const GlooAddress& address);

}  // namespace titan::dist
