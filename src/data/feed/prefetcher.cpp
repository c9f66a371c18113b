#include "data/feed/prefetcher.h"

#include <algorithm>

#include <ATen/ops/empty.h>

#include "titan/core/error.h"

namespace titan::data {
namespace {

// The caller holds one step, and for a moment the one before it: their slots aren't written while it does, so
// that their memory is free by the time it is needed.
constexpr size_t kSlotsInUse = 2;

// Whether nobody else holds the memory. A count of one can't grow again: there is no other holder to copy
// from.
bool is_ours_alone(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.use_count() > 1 || tensor.storage().use_count() > 1) return false;
  // Reading the count orders nothing. Dropping a handle does: what the last holder read, it has read.
  { [[maybe_unused]] c10::Storage handle = tensor.storage(); }
  return true;
}

}  // namespace

Prefetcher::Prefetcher(std::vector<std::unique_ptr<Lane>> lanes, const PrefetchOptions& options)
    : lanes_(std::move(lanes)), options_(options), slots_(options.num_ahead + kSlotsInUse) {
  auto num_lanes = static_cast<int64_t>(lanes_.size());
  TITAN_INTERNAL_ASSERT(num_lanes <= options_.num_rows && options_.num_ahead >= 1);
  options_.num_workers = std::clamp<int64_t>(options_.num_workers, 1, std::max<int64_t>(1, num_lanes));
  for (int64_t worker = 0; worker < options_.num_workers; ++worker)
    workers_.emplace_back([this, worker](std::stop_token stop) { work(stop, worker); });
}

Prefetcher::~Prefetcher() {
  for (auto& worker : workers_) worker.request_stop();
}

bool Prefetcher::is_ready() const {
  const Slot& slot = slots_[num_taken_ % slots_.size()];
  return slot.error || (slot.prepared_for == num_taken_ && slot.num_done == options_.num_workers);
}

bool Prefetcher::wait(std::chrono::milliseconds longest) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, longest, [&] { return is_ready(); });
}

PreparedStep Prefetcher::take() {
  std::unique_lock lock(mutex_);
  Slot& slot = slots_[num_taken_ % slots_.size()];
  changed_.wait(lock, [&] { return is_ready(); });
  if (slot.error) std::rethrow_exception(slot.error);
  PreparedStep step = slot.step;  // shares the tensors; whether they can be used again is decided when the
                                  // slot is next needed
  ++num_taken_;
  changed_.notify_all();
  return step;
}

void Prefetcher::work(std::stop_token stop, int64_t worker) {
  for (int64_t step = 0;; ++step) {
    Slot* slot = nullptr;
    std::exception_ptr error;
    try {
      slot = wait_for_slot(step, stop);
      if (!slot) return;
      fill_rows(*slot, worker);
    } catch (...) {
      error = std::current_exception();
    }
    finish(slot ? *slot : slots_[step % slots_.size()], error);
    if (error) return;
  }
}

Prefetcher::Slot* Prefetcher::wait_for_slot(int64_t step, std::stop_token stop) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait(lock, stop, [&] { return step < num_taken_ + options_.num_ahead; }) ||
      stop.stop_requested())
    return nullptr;
  Slot& slot = slots_[step % slots_.size()];
  if (slot.prepared_for != step) prepare(slot, step);
  return &slot;
}

void Prefetcher::prepare(Slot& slot, int64_t step) {
  slot.num_done = 0;
  slot.step.valid.assign(lanes_.size(), 0);
  slot.step.states.resize(lanes_.size());
  auto options = at::TensorOptions(at::kLong).pinned_memory(options_.pin_memory);
  for (at::Tensor* tensor : {&slot.step.input, &slot.step.labels}) {
    // A copy to the device may still be reading pinned memory that nobody holds; LibTorch's pinned allocator
    // knows, we don't.
    if (!options_.pin_memory && is_ours_alone(*tensor)) continue;
    *tensor = at::empty({options_.num_rows, options_.seq_len}, options);
  }
  auto num_lanes = static_cast<int64_t>(lanes_.size());
  slot.step.input.narrow(0, num_lanes, options_.num_rows - num_lanes).zero_();
  slot.step.labels.narrow(0, num_lanes, options_.num_rows - num_lanes).fill_(kIgnoredLabel);
  slot.prepared_for = step;
}

void Prefetcher::fill_rows(Slot& slot, int64_t worker) {
  auto length = static_cast<size_t>(options_.seq_len);
  auto* input = slot.step.input.mutable_data_ptr<int64_t>();
  auto* labels = slot.step.labels.mutable_data_ptr<int64_t>();
  for (size_t row = worker; row < lanes_.size(); row += options_.num_workers) {
    slot.step.valid[row] = lanes_[row]->fill(
        {.input = {input + row * length, length}, .labels = {labels + row * length, length}});
    slot.step.states[row] = lanes_[row]->state();
  }
}

void Prefetcher::finish(Slot& slot, std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  ++slot.num_done;
  if (error && !slot.error) slot.error = error;
  changed_.notify_all();
}

}  // namespace titan::data
