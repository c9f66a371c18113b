#include "parallel/activation_checkpoint/rng_state.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include <ATen/Context.h>

namespace titan::activations {

namespace {

// A generator's state is a tensor on the CPU, whatever the generator's device.
at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

}  // namespace

RngState::RngState(at::Device device) {
  const auto add = [this](at::Device of) {
    at::Generator generator = at::globalContext().defaultGenerator(of);
    at::Tensor state = state_of(generator);
    entries_.push_back({std::move(generator), std::move(state)});
  };
  add(at::kCPU);
  if (!device.is_cpu() && !device.is_meta()) add(device);
}

bool RngState::is_current() const {
  return std::all_of(entries_.begin(), entries_.end(), [](const Entry& entry) {
    at::Generator generator = entry.generator;
    return same_bytes(entry.state, state_of(generator));
  });
}

void RngState::restore() const {
  for (const Entry& entry : entries_) {
    at::Generator generator = entry.generator;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(entry.state);
  }
}

ScopedRngState::ScopedRngState(const RngState* state, at::Device device) {
  if (!state) return;
  outer_ = std::make_unique<const RngState>(device);
  state->restore();
}

ScopedRngState::~ScopedRngState() {
  if (outer_) outer_->restore();
}

}  // namespace titan::activations
