#include "dist/backends.h"

// LibTorch's header of the gloo backend is guarded by the macro that its own build sets.
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace titan::dist {
namespace {

using Gloo = c10d::ProcessGroupGloo;

auto make_devices(const GlooAddress& address) {
  decltype(Gloo::Options::devices) devices;
  for (const auto& interface : address.interfaces)
    devices.push_back(Gloo::createDeviceForInterface(interface));
  if (!devices.empty()) return devices;
  devices.push_back(address.address.empty() ? Gloo::createDefaultDevice()
                                            : Gloo::createDeviceForHostname(address.address));
  return devices;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_group(const GroupSpec& spec, const GlooAddress& address) {
  auto options = Gloo::Options::create(spec.timeout);
  options->devices = make_devices(address);
  // Calls of one group may overlap (a gather of the next layer, a reduction of the last), one thread each.
  options->threads = 2 * static_cast<int>(options->devices.size());
  return c10::make_intrusive<Gloo>(spec.store, spec.rank, spec.size, options);
}

}  // namespace titan::dist
