#include "parallel/peer_memory.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "titan/core/error.h"
#include "titan/dist/world.h"

namespace titan {

std::string why_not_all_share(dist::Group& group, const dist::DeviceBackend& devices) {
  constexpr dist::Label kLabel{"peer_memory::share"};
  const auto addresses = group.all_gather_text(devices.device_address(), kLabel);
  std::string mine;
  for (int peer = 0; peer < group.size() && mine.empty(); ++peer) {
    if (peer == group.rank()) continue;
    const std::string why = devices.why_no_symmetric_memory(addresses[static_cast<size_t>(peer)]);
    if (!why.empty())
      mine = str("rank ", group.ranks()[static_cast<size_t>(group.rank())], " can't share memory with rank ",
                 group.ranks()[static_cast<size_t>(peer)], ": ", why);
  }
  for (const std::string& why : group.all_gather_text(mine, kLabel))
    if (!why.empty()) return why;
  return "";
}

std::string why_no_peer_memory(const DeviceMesh& axis) {
  const auto group = axis.group();
  if (group->backend_name() != "nccl") return str("the backend is ", axis.world().backend());
  return why_not_all_share(*group, *dist::device_backend());
}

std::unique_ptr<dist::SymmetricMemory> make_peer_memory(const DeviceMesh& axis) {
  const dist::World& world = axis.world();
  const auto store = c10::intrusive_ptr<c10d::Store>::reclaim_copy(&world.store());
  // Later calls for the same ranks have keys of their own. Each rank counts its calls, which all of them make.
  const std::string keys = str("peer_memory/", c10::Join("-", axis.ranks()), "/");
  const int64_t number = store->add(str(keys, "calls of ", world.rank()), 1);
  const auto own_store = c10::make_intrusive<c10d::PrefixStore>(str(keys, number), store);
  const auto group = axis.group();
  return dist::device_backend()->make_symmetric_memory({.name = group->name(),
                                                        .store = own_store,
                                                        .rank = group->rank(),
                                                        .size = group->size(),
                                                        .world_ranks = group->ranks(),
                                                        .timeout = world.timeout()});
}

}  // namespace titan
