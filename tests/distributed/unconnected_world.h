#pragma once

// The ranks of the test once more, without any groups.

#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "dist/world_impl.h"
#include "distributed/world.h"

namespace titan::testing {

/// Its groups connect when they are first used. `name` differs from that of any other world of the process.
inline std::shared_ptr<dist::World::Impl> unconnected_world(const std::string& name) {
  auto impl = std::make_shared<dist::World::Impl>();
  impl->launch.rank = world().rank();
  impl->launch.size = world().size();
  impl->backend = world().backend();
  impl->timeout = world().timeout();
  impl->device = device();
  impl->devices = dist::device_backend();
  const auto store = c10::intrusive_ptr<c10d::Store>::reclaim_copy(&world().store());
  impl->store = c10::make_intrusive<c10d::PrefixStore>(name, store);
  impl->gloo = dist::choose_gloo_address(std::nullopt, /*one_host=*/true, "");
  impl->hosts.assign(static_cast<size_t>(world().size()), "here");
  impl->recorder = std::make_shared<dist::FlightRecorder>();
  return impl;
}

}  // namespace titan::testing
