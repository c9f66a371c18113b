#include "parallel/tensor/exchange_choice.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "parallel/tensor/collective_exchange.h"
#include "parallel/tensor/peer_memory_exchange.h"
#include "parallel/tensor/send_receive_exchange.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/peer_memory.h"

namespace titan::tp {

namespace {

constexpr dist::Label kLabel{"tp::choose_exchange"};

std::string names_of(const std::vector<int>& ranks) {
  std::string names;
  for (const int rank : ranks) names += str(names.empty() ? "" : "-", rank);
  return names;
}

std::unique_ptr<dist::PeerMemory> make_peer_memory(const DeviceMesh& axis, dist::DeviceBackend& devices) {
  const dist::World& world = axis.world();
  const auto store = c10::intrusive_ptr<c10d::Store>::reclaim_copy(&world.store());
  const auto own_store =
      c10::make_intrusive<c10d::PrefixStore>(str("peer_memory/", names_of(axis.ranks())), store);
  const auto group = axis.group();
  return devices.make_peer_memory({group->name(), own_store, group->rank(), group->size(), world.timeout()});
}

template <class Exchange>
CountedExchange counted(std::shared_ptr<const Exchange> exchange) {
  return {exchange, exchange->traffic()};
}

void log_choice(const std::string& text) {
  log::info_rank0(str("asynchronous tensor parallelism: parts travel ", text));
}

// What ranks that are only played (a plan is printed) can't find out.
std::string way_of_plan(OverlapTransport transport) {
  switch (transport) {
    case OverlapTransport::Auto:
      return "sent and received, or through symmetric memory over NVLink";
    case OverlapTransport::SymmetricMemory:
      return "through symmetric memory";
    case OverlapTransport::SendReceive:
      return "sent and received";
    case OverlapTransport::AtOnce:
      return "at once";
  }
  return "";
}

}  // namespace

std::string why_no_peer_memory(dist::Group& group, const dist::DeviceBackend& devices) {
  const auto addresses = group.all_gather_text(devices.device_address(), kLabel);
  std::string mine;
  for (int peer = 0; peer < group.size() && mine.empty(); ++peer) {
    if (peer == group.rank()) continue;
    const std::string why = devices.why_no_peer_memory(addresses[static_cast<size_t>(peer)]);
    if (!why.empty())
      mine = str("rank ", group.ranks()[static_cast<size_t>(group.rank())], " can't share memory with rank ",
                 group.ranks()[static_cast<size_t>(peer)], ": ", why);
  }
  for (const std::string& why : group.all_gather_text(mine, kLabel))
    if (!why.empty()) return why;
  return "";
}

namespace {

std::string why_no_symmetric_memory(const DeviceMesh& axis, dist::DeviceBackend* devices) {
  return devices ? why_no_peer_memory(*axis.group(), *devices)
                 : str("the backend is ", axis.world().backend());
}

}  // namespace

MakeExchange collective_exchange(std::shared_ptr<const TpGroup> group) {
  return [group = std::move(group)](const char* module) {
    return counted(std::make_shared<const CollectiveExchange>(group, module));
  };
}

MakeExchange choose_exchange(const DeviceMesh& axis, OverlapTransport transport) {
  const auto group = axis.group();
  const std::string carrier = group->backend_name();
  const auto sends = [&](const std::string& way) -> MakeExchange {
    return [group, way](const char* module) {
      return counted(std::make_shared<const SendReceiveExchange>(group, module, way));
    };
  };
  if (group->size() == 1 || carrier == "fake") return sends(way_of_plan(transport));
  if (transport == OverlapTransport::SendReceive) {
    log_choice("by sends and receives, as the settings say");
    return sends(way_of_plan(transport));
  }
  dist::DeviceBackend* devices = carrier == "nccl" ? dist::device_backend() : nullptr;
  const std::string why = why_no_symmetric_memory(axis, devices);
  if (!why.empty() && transport == OverlapTransport::SymmetricMemory)
    throw ConfigError("parallelism.async_tensor_parallel_transport = \"symmetric_memory\": " + why);
  if (!why.empty()) {
    log_choice(str("by sends and receives, as ", why));
    return sends(way_of_plan(OverlapTransport::SendReceive));
  }
  log_choice("through symmetric memory");
  const auto pieces = std::make_shared<PeerPieces>(PeerPieces{make_peer_memory(axis, *devices)});
  // Their copies aren't calls of a group: no record takes the module's name.
  return [pieces](const char* /*module*/) {
    return counted(std::make_shared<const PeerMemoryExchange>(pieces));
  };
}

}  // namespace titan::tp
