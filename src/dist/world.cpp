// dist::init, and the groups of a World. A new group is connected (gloo or NCCL), then checked by a known
// sum; that sum is also the barrier after which no member needs the store for it any more.

#include "titan/dist/world.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>

#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "environment.h"
#include "fake_backend.h"
#include "gloo_backend.h"
#include "group_backends.h"
#include "host_backend.h"
#include "rendezvous.h"
#include "titan/core/error.h"
#include "titan/dist/collectives.h"
#include "titan/dist/device_backend.h"
#include "titan/dist/flight_record.h"

namespace titan::dist {

struct World::Impl {
  Launch launch;
  std::string backend;
  std::chrono::seconds timeout{};
  c10::Device device = c10::kCPU;
  DeviceBackend* devices = nullptr;
  c10::intrusive_ptr<c10d::Store> store;
  GlooAddress gloo;
  std::vector<std::string> hosts;  // by rank
  bool direct_memory = true;
  std::shared_ptr<FlightRecorder> recorder = std::make_shared<FlightRecorder>();

  std::mutex mutex;
  std::map<std::pair<std::vector<int>, std::string>, std::shared_ptr<Group>> groups;  // by ranks and purpose

  ~Impl() {
    // While an error unwinds, its message matters more than an orderly goodbye: the others see the sockets
    // close.
    if (std::uncaught_exceptions() > 0 || backend == "fake") return;
    groups.clear();
    leave(*store, launch);
  }

  // `key` names the group in the store: its members alone have to agree on it.
  GroupSpec spec_of(const std::string& name, const std::string& key, const char* kind, int rank,
                    int size) const {
    const std::string prefix = str("group/", key, "/", kind);
    return {name, c10::make_intrusive<c10d::PrefixStore>(prefix, store), rank, size, timeout};
  }
  std::unique_ptr<GroupBackends> make_backends(const std::vector<int>& ranks, const std::string& name,
                                               const std::string& key, int rank);
  bool on_one_host(const std::vector<int>& ranks) const;
  std::shared_ptr<Group> make_group(const std::vector<int>& ranks, const std::string& name,
                                    const std::string& purpose);
  void check_sum(Group& group) const;
};

std::unique_ptr<GroupBackends> World::Impl::make_backends(const std::vector<int>& ranks,
                                                          const std::string& name, const std::string& key,
                                                          int rank) {
  const int size = static_cast<int>(ranks.size());
  if (size == 1) return nullptr;
  auto backends = std::make_unique<GroupBackends>();
  if (backend == "fake") {
    backends->main = make_fake_group(rank, size);
    return backends;
  }
  const GroupSpec sockets = spec_of(name, key, "gloo", rank, size),
                  host = spec_of(name, key, "host", rank, size);
  const auto make_host = [sockets, host, address = gloo, direct = direct_memory && on_one_host(ranks)] {
    auto group = make_gloo_group(sockets, address);
    auto faster = direct ? make_host_group(host, group) : nullptr;
    return faster ? faster : group;
  };
  if (backend == "gloo") {
    backends->main = make_host();
  } else {
    backends->main = devices->make_group(spec_of(name, key, "nccl", rank, size));
    backends->make_host = make_host;
  }
  return backends;
}

bool World::Impl::on_one_host(const std::vector<int>& ranks) const {
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return hosts[rank] == hosts[ranks[0]]; });
}

namespace {

/// Short whatever the number of ranks: first, last, count and a hash (FNV-1a).
std::string fingerprint(const std::vector<int>& ranks) {
  uint64_t hash = 14695981039346656037ULL;
  for (const int rank : ranks) hash = (hash ^ static_cast<uint64_t>(rank)) * 1099511628211ULL;
  return str(ranks.front(), "-", ranks.back(), "x", ranks.size(), ".", hash);
}

}  // namespace

std::shared_ptr<Group> World::Impl::make_group(const std::vector<int>& ranks, const std::string& name,
                                               const std::string& purpose) {
  const auto me = std::find(ranks.begin(), ranks.end(), launch.rank);
  const std::string key = str(purpose, ".", fingerprint(ranks));
  std::unique_ptr<GroupBackends> backends;
  if (me != ranks.end()) {
    try {
      backends = make_backends(ranks, name, key, static_cast<int>(me - ranks.begin()));
    } catch (const c10::Error& error) {
      throw Error(str("rank ", launch.rank, " couldn't join group '", name, "' of ", ranks.size(),
                      " ranks: ", error.what_without_backtrace()));
    }
  }
  auto group = std::make_shared<Group>(name, ranks, launch.rank, std::move(backends), recorder);
  if (group->contains_me() && group->size() > 1 && backend != "fake") check_sum(*group);
  return group;
}

void World::Impl::check_sum(Group& group) const {
  at::Tensor sum = at::full({3}, group.rank() + 1, at::TensorOptions(at::kFloat).device(device));
  group.all_reduce(sum, ReduceOp::Sum, {"dist::check_sum"}).wait();
  const double expected = group.size() * (group.size() + 1) / 2.0;
  const double got = sum.sum().item<double>();
  TITAN_CHECK(got == 3 * expected, "group '", group.name(), "': the ", backend, " sum of 1..", group.size(),
              " came out as ", got / 3, " instead of ", expected,
              ": the ranks run different builds, or the network damages data");
}

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

/// The address of this host on the route to `host`, "" when it can't be told or is a loopback one. A host
/// name often resolves to 127.0.1.1 on its own host, which nobody else can reach.
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

GlooAddress choose_gloo_address(const Environment& environment, const Launch& launch,
                                const std::vector<Peer>& peers) {
  GlooAddress address;
  if (auto interfaces = environment("GLOO_SOCKET_IFNAME")) address.interfaces = split_at_commas(*interfaces);
  const bool one_host =
      std::all_of(peers.begin(), peers.end(), [&](const Peer& p) { return p.host == peers[0].host; });
  address.address = one_host ? "127.0.0.1" : address_towards(launch.store_host);
  return address;
}

/// Fills in what the launcher didn't tell: position among the ranks of the same host.
void count_local_ranks(Launch& launch, const std::vector<Peer>& peers) {
  if (launch.local_rank >= 0 && launch.local_size > 0) return;
  int before = 0, all = 0;
  for (int rank = 0; rank < launch.size; ++rank) {
    if (peers[rank].host != peers[launch.rank].host) continue;
    ++all;
    before += rank < launch.rank;
  }
  if (launch.local_rank < 0) launch.local_rank = before;
  if (launch.local_size < 1) launch.local_size = std::max(all, launch.local_rank + 1);
}

DeviceBackend* choose_devices(const InitOptions& options) {
  if (options.device != "auto" && options.device != "cpu" && options.device != "cuda") {
    throw ConfigError(str("device '", options.device, "' isn't one of auto, cpu, cuda"));
  }
  DeviceBackend* devices = options.device == "cpu" ? nullptr : open_cuda_plugin();
  if (options.device == "cuda" && !devices) {
    throw ConfigError("device 'cuda': no GPU is visible to this process, or libtitan_cuda wasn't built");
  }
  return devices;
}

std::string choose_backend(const InitOptions& options, const DeviceBackend* devices) {
  if (options.backend == "auto") return devices ? "nccl" : "gloo";
  if (options.backend != "gloo" && options.backend != "nccl") {
    throw ConfigError(str("backend '", options.backend, "' isn't one of auto, gloo, nccl, fake"));
  }
  if (options.backend == "nccl" && !devices) {
    throw ConfigError("backend 'nccl' needs a GPU, and none is visible to this process");
  }
  return options.backend;
}

void choose_device(World::Impl& world) {
  if (!world.devices) return;
  const int num_devices = world.devices->num_devices();
  if (world.backend == "nccl" && world.launch.local_size > num_devices) {
    throw ConfigError(str(world.launch.local_size, " ranks on a host with ", num_devices,
                          " visible GPUs: NCCL wants a GPU for each (gloo lets ranks share one)"));
  }
  const int index = world.launch.local_rank % num_devices;
  world.devices->set_device(index);
  world.device = c10::Device(world.devices->device_type(), static_cast<c10::DeviceIndex>(index));
}

World make_fake_world(const InitOptions& options) {
  if (options.fake_world_size < 1 || options.fake_rank < 0 || options.fake_rank >= options.fake_world_size) {
    throw ConfigError(
        str("fake_rank ", options.fake_rank, " isn't a rank of fake_world_size ", options.fake_world_size));
  }
  auto impl = std::make_shared<World::Impl>();
  impl->launch.by = "fake";
  impl->launch.rank = options.fake_rank;
  impl->launch.size = options.fake_world_size;
  impl->launch.local_rank = 0;
  impl->launch.local_size = 1;
  impl->backend = "fake";
  impl->timeout = options.timeout;
  impl->store = make_private_store();
  return World(std::move(impl));
}

}  // namespace

World init(const InitOptions& options) {
  if (options.backend == "fake") return make_fake_world(options);
  const Environment environment = process_environment();
  auto impl = std::make_shared<World::Impl>();
  impl->launch = read_launch(environment);
  impl->devices = choose_devices(options);
  impl->backend = choose_backend(options, impl->devices);
  impl->timeout = options.timeout;
  Rendezvous rendezvous = meet(impl->launch, options.timeout);
  impl->store = std::move(rendezvous.store);
  count_local_ranks(impl->launch, rendezvous.peers);
  for (const auto& peer : rendezvous.peers) impl->hosts.push_back(peer.host);
  impl->direct_memory = options.direct_memory;
  impl->gloo = choose_gloo_address(environment, impl->launch, rendezvous.peers);
  choose_device(*impl);
  World world(std::move(impl));
  world.everyone();
  return world;
}

int World::rank() const { return impl_->launch.rank; }
int World::size() const { return impl_->launch.size; }
int World::local_rank() const { return impl_->launch.local_rank; }
int World::local_size() const { return impl_->launch.local_size; }
const std::string& World::backend() const { return impl_->backend; }
const std::string& World::launched_by() const { return impl_->launch.by; }
c10::Device World::device() const { return impl_->device; }
std::chrono::seconds World::timeout() const { return impl_->timeout; }
c10d::Store& World::store() const { return *impl_->store; }
const FlightRecorder& World::recorder() const { return *impl_->recorder; }

void World::set_timeout(std::chrono::seconds timeout) const {
  std::lock_guard lock(impl_->mutex);
  impl_->timeout = timeout;
  for (auto& [ranks, group] : impl_->groups) group->set_timeout(timeout);
}

std::shared_ptr<Group> World::group(const std::vector<int>& ranks, const std::string& name,
                                    const std::string& purpose) const {
  TITAN_CHECK(!ranks.empty() && std::is_sorted(ranks.begin(), ranks.end(), std::less_equal<>()) &&
                  ranks.front() >= 0 && ranks.back() < size(),
              "group '", name, "' wants ascending ranks of a world of ", size(), ", got ", ranks.size(),
              " others");
  std::lock_guard lock(impl_->mutex);
  auto& group = impl_->groups[{ranks, purpose}];
  if (!group) group = impl_->make_group(ranks, name, purpose);
  return group;
}

std::shared_ptr<Group> World::everyone() const {
  std::vector<int> ranks(static_cast<size_t>(size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return group(ranks, "world");
}

}  // namespace titan::dist
