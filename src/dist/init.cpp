// dist::init: who started us, which device and backend, meeting the others.

#include <algorithm>

#include "device_choice.h"
#include "titan/core/crash.h"
#include "titan/core/log.h"
#include "world_impl.h"

namespace titan::dist {
namespace {

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

/// That of the store; but from its own host the way there doesn't leave the host: another rank's.
std::string other_host(const Launch& launch, const std::vector<Peer>& peers) {
  const auto other =
      std::find_if(peers.begin(), peers.end(), [](const Peer& peer) { return !peer.address.empty(); });
  return peers[launch.rank].address.empty() && other != peers.end() ? other->address : launch.store_host;
}

DeviceBackend* choose_devices(const InitOptions& options, int rank) {
  if (options.device != "auto" && options.device != "cpu" && options.device != "cuda") {
    throw ConfigError(str("device '", options.device, "' isn't one of auto, cpu, cuda"));
  }
  DeviceBackend* devices = options.device == "cpu" ? nullptr : open_cuda_plugin();
  if (options.device == "cuda" && !devices) {
    throw ConfigError("device 'cuda': no GPU is visible to this process, or libtitan_cuda wasn't built");
  }
  const std::string warning = missing_plugin_warning({options.device, gpu_visible(), cuda_plugin_path()});
  if (!warning.empty() && rank == 0) log::warning(warning);
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
  impl->recorder = std::make_shared<FlightRecorder>(options.flight_entries);
  return World(std::move(impl));
}

}  // namespace

World init(const InitOptions& options) {
  install_crash_handler();
  if (options.backend == "fake") return make_fake_world(options);
  const Environment environment = process_environment();
  auto impl = std::make_shared<World::Impl>();
  impl->launch = read_launch(environment);
  impl->devices = choose_devices(options, impl->launch.rank);
  impl->backend = choose_backend(options, impl->devices);
  impl->timeout = options.timeout;
  impl->recorder = std::make_shared<FlightRecorder>(options.flight_entries);
  impl->check_collectives = options.check_collectives;
  Rendezvous rendezvous = meet(impl->launch, options.timeout);
  impl->store = std::move(rendezvous.store);
  count_local_ranks(impl->launch, rendezvous.peers);
  for (const auto& peer : rendezvous.peers) impl->hosts.push_back(peer.host);
  impl->direct_memory = options.direct_memory;
  const auto& hosts = impl->hosts;
  const bool one_host = std::count(hosts.begin(), hosts.end(), hosts[0]) == impl->launch.size;
  impl->gloo = choose_gloo_address(environment("GLOO_SOCKET_IFNAME"), one_host,
                                   other_host(impl->launch, rendezvous.peers));
  choose_device(*impl);
  if (!impl->device.is_cpu()) impl->sweep = std::make_unique<DeviceSweep>(impl->recorder);
  World world(std::move(impl));
  world.everyone();
  return world;
}

}  // namespace titan::dist
