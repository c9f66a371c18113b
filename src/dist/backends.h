#pragma once

// What carries a group's calls.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "dist/device_backend.h"

namespace titan::dist {

struct GroupBackends {
  using Pointer = c10::intrusive_ptr<c10d::Backend>;

  Pointer main;
  /// Where `main` serves device tensors only (NCCL): makes the one for CPU tensors at their first use. All
  /// members come to it at the same call. Empty where `main` serves both.
  std::function<Pointer()> make_host;
  Pointer host;

  c10d::Backend& for_tensor(const at::Tensor& tensor) {
    if (!make_host || (tensor.defined() && !tensor.is_cpu())) return *main;
    if (!host) host = make_host();
    return *host;
  }
};

// Groups over TCP sockets on the CPU, by the gloo inside LibTorch.

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

// Groups whose ranks are on one host: collectives copy straight from the memory of the others
// (host_channel.h).

/// Collective. `sockets` (gloo, of the same ranks) carries send and receive. Null, on all ranks alike, where
/// the kernel or a container keeps the ranks from reading each other's memory.
c10::intrusive_ptr<c10d::Backend> make_host_group(const GroupSpec& spec,
                                                  c10::intrusive_ptr<c10d::Backend> sockets);

}  // namespace titan::dist

namespace c10d {

// A backend without peers: one process plays one rank of any world, for dry runs, layouts and cost.
// Every call is done at once. What would come from the others is made of this rank's own data, so that values
// stay finite: gathered parts are copies of the own one, reductions return the own part. Meta tensors are
// accepted.

class Backend;
}  // namespace c10d

namespace titan::dist {

c10::intrusive_ptr<c10d::Backend> make_fake_group(int rank, int size);

}  // namespace titan::dist
