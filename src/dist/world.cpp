// [Note: world]
// dist::init detects the launcher, chooses device and backend, and meets the other ranks. A new group is
// connected (gloo), then checked by a known sum; after that sum no member needs the store for it any more. Where
// device tensors go over NCCL, a group connects at its first call instead, and checks NCCL's sum then: many
// groups carry only tensors of one kind.

#include "titan/dist/world.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <set>
#include <thread>

#include <ATen/ops/full.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/hash.h"
#include "dist/backends.h"
#include "dist/device_backend.h"
#include "dist/planned_devices.h"
#include "dist/world_impl.h"
#include "titan/core/crash.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::dist {

namespace {

at::Tensor first_summand(int group_rank, c10::Device device) {
  return at::full({3}, group_rank + 1, at::TensorOptions(at::kFloat).device(device));
}

void check_sum(const at::Tensor& sum, const GroupSpec& spec) {
  const double expected = spec.size * (spec.size + 1) / 2.0;
  const double got = sum.sum().item<double>();
  TITAN_CHECK(got == 3 * expected, "group '", spec.name, "': the sum of 1..", spec.size, " came out as ",
              got / 3, " instead of ", expected,
              ": the ranks run different builds, or the network damages data");
}

GroupSpec within_limit(GroupSpec spec, std::chrono::milliseconds limit) {
  if (limit.count() > 0) spec.timeout = limit;
  return spec;
}

}  // namespace

std::unique_ptr<GroupBackends> World::Impl::make_backends(const std::vector<int>& ranks,
                                                          const std::string& name, const std::string& key,
                                                          int rank) {
  const int size = static_cast<int>(ranks.size());
  if (size == 1) return nullptr;
  auto backends = std::make_unique<GroupBackends>();
  if (backend == "fake") {
    backends->main = is_planned(device) ? devices->make_group(spec_of(name, key, "fake", rank, ranks))
                                        : make_fake_group(rank, size, /*has_batches=*/device.is_cuda());
    return backends;
  }
  const GroupSpec sockets = spec_of(name, key, "gloo", rank, ranks),
                  host = spec_of(name, key, "host", rank, ranks);
  const auto make_host = [sockets, host, address = gloo,
                          direct = direct_memory && on_one_host(ranks)](std::chrono::milliseconds limit) {
    // gloo's sends keep the limit that their group was made with, whatever is set later.
    auto group = make_gloo_group(sockets, address);
    if (limit.count() > 0) group->setTimeout(limit);
    auto faster = direct ? make_host_group(within_limit(host, limit), group) : nullptr;
    return faster ? faster : group;
  };
  if (backend == "gloo") {
    backends->main = make_host({});
  } else {
    GroupSpec of_devices = spec_of(name, key, "nccl", rank, ranks);
    of_devices.has_long_receives = key.starts_with(kLongReceives);
    backends->make_main = [spec = std::move(of_devices), devices = devices,
                           device = device](std::chrono::milliseconds limit) {
      BackendPtr group = devices->make_group(within_limit(spec, limit));
      if (spec.has_long_receives) return group;  // a sum would take buffers of a ring, of no other use
      std::vector<at::Tensor> sums = {first_summand(spec.rank, device)};
      group->allreduce(sums)->wait();
      check_sum(sums[0], spec);
      return group;
    };
    backends->make_host = make_host;
  }
  return backends;
}

bool World::Impl::on_one_host(const std::vector<int>& ranks) const {
  return std::ranges::all_of(ranks, [&](int rank) { return hosts[rank] == hosts[ranks[0]]; });
}

namespace {

/// Short for any number of ranks: first, last, count and a hash.
std::string fingerprint(const std::vector<int>& ranks) {
  const uint64_t hash = hash_bytes({reinterpret_cast<const char*>(ranks.data()), ranks.size() * sizeof(int)});
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
                      " ranks: ", reason_of(error)));
    }
  }
  std::unique_ptr<CallChecker> checker;
  if (waiting_calls && backends)
    checker = std::make_unique<CallChecker>(
        spec_of(name, key, "calls", static_cast<int>(me - ranks.begin()), ranks), ranks, waiting_calls);
  auto group = std::make_shared<Group>(Group::Parts{.name = name,
                                                    .purpose = purpose,
                                                    .ranks = ranks,
                                                    .my_world_rank = launch.rank,
                                                    .backends = std::move(backends),
                                                    .recorder = recorder,
                                                    .checker = std::move(checker)});
  if (group->contains_me() && group->size() > 1 && backend == "gloo") {
    const at::Tensor sum = first_summand(group->rank(), device);
    group->all_reduce(sum, ReduceOp::Sum, {"dist::check_sum"}).wait();
    check_sum(sum, spec_of(name, key, "gloo", group->rank(), ranks));
  }
  return group;
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
FlightRecorder& World::recorder() const { return *impl_->recorder; }
std::shared_ptr<FlightRecorder> World::shared_recorder() const { return impl_->recorder; }

void World::set_timeout(std::chrono::seconds timeout) const {
  std::lock_guard lock(impl_->mutex);
  impl_->timeout = timeout;
  for (auto& [ranks_and_purpose, group] : impl_->groups)
    if (!ranks_and_purpose.second.starts_with(kOwnTimeout)) group->set_timeout(timeout);
}

std::shared_ptr<Group> World::group(const std::vector<int>& ranks, const std::string& name,
                                    const std::string& purpose) const {
  TITAN_CHECK(!ranks.empty() && std::is_sorted(ranks.begin(), ranks.end(), std::less_equal<>()) &&
                  ranks.front() >= 0 && ranks.back() < size(),
              "group '", name, "' needs at least one rank, and ranks in ascending order, below ", size(),
              "; got [", c10::Join(", ", ranks), "]");
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

// ---- dist::init: detects the launcher, chooses device and backend, and meets the other ranks

namespace {

/// Fills in the position among the ranks of the same host if the launcher didn't say.
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

/// A host on the route to the others: the store's host, or on that host another rank's.
std::string other_host(const Launch& launch, const std::vector<Peer>& peers) {
  const auto other = std::ranges::find_if(peers, [](const Peer& peer) { return !peer.address.empty(); });
  return peers[launch.rank].address.empty() && other != peers.end() ? other->address : launch.store_host;
}

DeviceBackend* choose_devices(const InitOptions& options, int rank) {
  if (options.device != "auto" && options.device != "cpu" && options.device != "cuda")
    throw ConfigError(str("device '", options.device, "' isn't one of auto, cpu, cuda"));
  DeviceBackend* devices = options.device == "cpu" ? nullptr : open_cuda_plugin();
  if (options.device == "cuda" && !devices)
    throw ConfigError(cuda_failure().empty()
                          ? "device 'cuda': no GPU is visible to this process, or libtitan_cuda wasn't built"
                          : str("device 'cuda': CUDA can't use the GPU that is visible: ", cuda_failure()));
  const std::string warning =
      unused_gpu_warning(options.device, gpu_visible(), cuda_plugin_path(), devices ? "" : cuda_failure());
  if (!warning.empty() && rank == 0) log::warning(warning);
  return devices;
}

std::string choose_backend(const InitOptions& options, const DeviceBackend* devices) {
  if (options.backend == "auto") return devices ? "nccl" : "gloo";
  if (options.backend != "gloo" && options.backend != "nccl")
    throw ConfigError(str("backend '", options.backend, "' isn't one of auto, gloo, nccl, fake"));
  if (options.backend == "nccl" && !devices)
    throw ConfigError("backend 'nccl' needs a GPU, and none is visible to this process");
  return options.backend;
}

void check_num_devices(const std::string& backend, int local_size, int num_devices) {
  if (backend == "nccl" && local_size > num_devices)
    throw ConfigError(str(local_size, " ranks on a host with ", num_devices,
                          " visible GPUs: NCCL needs one GPU per rank (gloo lets ranks share one)"));
}

// Each rank of this host may see its own GPU only, as with SLURM's --gpus-per-task.
void check_devices_differ(const World::Impl& world) {
  const auto key = [](size_t rank) { return str("titan/device/", rank); };
  const auto me = static_cast<size_t>(world.launch.rank);
  world.store->set(key(me), world.devices->device_address());
  std::vector<std::string> keys;
  for (size_t rank = 0; rank < world.hosts.size(); ++rank)
    if (world.hosts[rank] == world.hosts[me]) keys.push_back(key(rank));
  try {
    // A rank that sees more GPUs doesn't come here.
    world.store->wait(keys, std::min<std::chrono::milliseconds>(world.timeout, std::chrono::seconds(30)));
  } catch (const std::exception&) {
    return check_num_devices(world.backend, world.launch.local_size, world.devices->num_devices());
  }
  std::set<std::string> devices;
  for (const std::string& of_rank : keys) devices.insert(world.store->get_to_str(of_rank));
  if (devices.size() == keys.size()) return;
  // Rank 0's process keeps the store, from which the others read the same.
  if (me == 0) std::this_thread::sleep_for(std::chrono::milliseconds(500));
  check_num_devices(world.backend, world.launch.local_size, world.devices->num_devices());
}

void choose_device(World::Impl& world) {
  if (!world.devices) return;
  const int num_devices = world.devices->num_devices();
  const int index = world.launch.local_rank % num_devices;
  world.devices->set_device(index);
  world.device = c10::Device(world.devices->device_type(), static_cast<c10::DeviceIndex>(index));
  if (world.backend == "nccl" && world.launch.local_size > num_devices) check_devices_differ(world);
}

World make_fake_world(const InitOptions& options) {
  if (options.fake_world_size < 1 || options.fake_rank < 0 || options.fake_rank >= options.fake_world_size) {
    throw ConfigError(
        str("fake_rank ", options.fake_rank, " isn't a rank of fake_world_size ", options.fake_world_size));
  }
  auto impl = std::make_shared<World::Impl>();
  impl->launch = {.by = "fake",
                  .rank = options.fake_rank,
                  .size = options.fake_world_size,
                  .local_rank = 0,
                  .local_size = 1,
                  .store_host = ""};
  impl->backend = "fake";
  impl->timeout = options.timeout;
  impl->store = make_private_store();
  impl->recorder = std::make_shared<FlightRecorder>(options.flight_entries);
  if (options.device == "cuda") impl->devices = choose_devices(options, options.fake_rank);
  choose_device(*impl);
  return World(std::move(impl));
}

constexpr const char* kFirst = "titan/first_failure";
constexpr const char* kNumReports = "titan/failures_reported";

// Enough for a failure to pass through a pipeline, from neighbor to neighbor.
constexpr auto kGrace = std::chrono::seconds(2);

// Rank 0's process keeps the store, and doesn't exit until the others have reported. A lost rank never does.
void wait_for_reports(c10d::Store& store, int num_ranks) {
  const auto end = std::chrono::steady_clock::now() + kGrace;
  while (store.add(kNumReports, 0) + 1 < num_ranks && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

}  // namespace

void check_devices(const InitOptions& options, int local_size) {
  if (options.backend == "fake") return;
  const DeviceBackend* const devices = choose_devices(options, /*rank=*/0);
  const std::string backend = choose_backend(options, devices);
  if (devices) check_num_devices(backend, local_size, devices->num_devices());
}

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
  Rendezvous rendezvous = meet(impl->launch, options.timeout);
  impl->store = std::move(rendezvous.store);
  if (options.check_collectives)
    impl->waiting_calls = std::make_shared<WaitingCalls>(
        c10::make_intrusive<c10d::PrefixStore>("waiting", impl->store), impl->launch.rank);
  count_local_ranks(impl->launch, rendezvous.peers);
  for (const auto& peer : rendezvous.peers) impl->hosts.push_back(peer.host);
  impl->direct_memory = options.direct_memory;
  const bool one_host = std::ranges::count(impl->hosts, impl->hosts[0]) == impl->launch.size;
  impl->gloo = choose_gloo_address(environment("GLOO_SOCKET_IFNAME"), one_host,
                                   other_host(impl->launch, rendezvous.peers));
  choose_device(*impl);
  if (!impl->device.is_cpu())
    impl->sweep = std::make_unique<SideThread>(
        "titan-sweep",
        [recorder = impl->recorder, devices = impl->devices] {
          devices->use_device_of_process();
          recorder->sweep();
        },
        std::chrono::milliseconds(500));
  World world(std::move(impl));
  world.everyone();
  return world;
}

std::string tell_failure(const World& world, const std::string& message,
                         const std::function<void()>& let_go) {
  const std::string mine = str("rank ", world.rank(), ": ", message);
  if (world.size() == 1) return "";
  bool has_reported = false;
  try {
    c10d::Store& store = world.store();
    const std::string first = store.compareSet(kFirst, "", mine);
    store.add(kNumReports, 1);
    has_reported = true;
    let_go();
    if (world.rank() == 0 && world.backend() != "fake") wait_for_reports(store, world.size());
    return first == mine ? "" : first;
  } catch (const std::exception&) {
    if (!has_reported) let_go();
    return "probably rank 0 of the job: the store that it, or its launcher, keeps is gone";
  }
}

}  // namespace titan::dist
