#pragma once

// How the parts of overlapped products travel: through the memory of peers where all ranks of the axis reach
// each other's, else by sends and receives.

#include <functional>
#include <memory>
#include <string>

#include "parallel/tensor/tp_group.h"
#include "parallel/tensor/traffic.h"
#include "titan/dist/collectives.h"
#include "titan/dist/device_backend.h"
#include "titan/dist/device_mesh.h"
#include "titan/ops/sequence_exchange.h"
#include "titan/parallel/tensor_parallel.h"

namespace titan::tp {

struct CountedExchange {
  std::shared_ptr<const ops::SequenceExchange> exchange;
  std::shared_ptr<const Traffic> traffic;
};

/// Why the ranks of `group` can't all share memory, the same text on each; empty: they can. Collective.
std::string why_no_peer_memory(dist::Group& group, const dist::DeviceBackend& devices);

/// Makes modules' exchanges, all of one carrier. `module`: its name, interned.
using MakeExchange = std::function<CountedExchange(const char* module)>;

/// All ranks of `axis` come to this call. Rank 0 logs what was chosen. Throws ConfigError on all where
/// symmetric memory was asked for and there is none.
MakeExchange choose_exchange(const DeviceMesh& axis, OverlapTransport transport = OverlapTransport::Auto);

/// OverlapTransport::AtOnce's.
MakeExchange collective_exchange(std::shared_ptr<const TpGroup> group);

}  // namespace titan::tp
