#pragma once

// The state of a World. world.cpp fills it in and makes its groups.

#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "core/threads.h"
#include "dist/backends.h"
#include "dist/device_backend.h"
#include "dist/environment.h"
#include "dist/flight_record.h"
#include "dist/rendezvous.h"
#include "titan/core/error.h"
#include "titan/dist/collectives.h"
#include "titan/dist/world.h"

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
  std::shared_ptr<FlightRecorder> recorder;
  std::unique_ptr<SideThread> sweep;            // sweeps the recorder twice a second; null without a device
  std::shared_ptr<WaitingCalls> waiting_calls;  // for debug.check_collectives; null without it

  std::mutex mutex;
  std::map<std::pair<std::vector<int>, std::string>, std::shared_ptr<Group>> groups;  // by ranks and purpose

  ~Impl() {
    // While an error unwinds, its message matters more than an orderly goodbye: the others see the sockets
    // close.
    if (std::uncaught_exceptions() > 0 || backend == "fake") return;
    // A call's last bytes may still be on their way to another host when this device is done with it, and destroying a communicator cuts that off. So
    // all ranks first get what they wait for.
    if (devices && backend == "nccl") {
      devices->finish_calls();
      wait_for_all_at_end(*store, launch);
    }
    groups.clear();
    leave(*store, launch);
  }

  // `key` names the group in the store; only its members have to agree on it.
  GroupSpec spec_of(const std::string& name, const std::string& key, const char* kind, int rank,
                    const std::vector<int>& ranks) const {
    const std::string prefix = str("group/", key, "/", kind);
    return {.name = name,
            .store = c10::make_intrusive<c10d::PrefixStore>(prefix, store),
            .rank = rank,
            .size = static_cast<int>(ranks.size()),
            .world_ranks = ranks,
            .timeout = timeout};
  }
  std::unique_ptr<GroupBackends> make_backends(const std::vector<int>& ranks, const std::string& name,
                                               const std::string& key, int rank);
  bool on_one_host(const std::vector<int>& ranks) const;
  std::shared_ptr<Group> make_group(const std::vector<int>& ranks, const std::string& name,
                                    const std::string& purpose);
};

}  // namespace titan::dist
