#include "plan/trace.h"

#include <array>
#include <iterator>
#include <utility>

namespace titan::plan {

const char* name_of(Category category) {
  static constexpr std::array<const char*, kNumCategories> names = {
      "parameters", "gathered", "gradients", "optimizer", "activations", "buffers", "communication"};
  return names[static_cast<size_t>(category)];
}

int Trace::number_of(const std::string& text) {
  const std::lock_guard lock(mutex_);
  const auto [found, is_new] = numbers_.try_emplace(text, static_cast<int>(names_.size()));
  if (is_new) names_.push_back(text);
  return found->second;
}

void Trace::begin_step(int64_t stream) {
  const std::lock_guard lock(mutex_);
  computing_stream_ = stream;
  entries_.push_back({Entry::Kind::Step, static_cast<size_t>(num_steps_++)});
}

void Trace::allocated(uintptr_t address, const Allocation& allocation) {
  const std::lock_guard lock(mutex_);
  in_use_[address] = allocations_.size();
  entries_.push_back({Entry::Kind::Allocate, allocations_.size()});
  allocations_.push_back(allocation);
}

void Trace::freed(uintptr_t address) {
  const std::lock_guard lock(mutex_);
  const auto found = in_use_.find(address);
  if (found == in_use_.end()) return;
  entries_.push_back({Entry::Kind::Free, found->second});
  in_use_.erase(found);
}

void Trace::launched(const Launch& launch) {
  const std::lock_guard lock(mutex_);
  entries_.push_back({Entry::Kind::Launch, launches_.size()});
  launches_.push_back(launch);
}

int Trace::called(std::vector<Collective> calls) {
  const std::lock_guard lock(mutex_);
  const int batch = ++num_batches_;
  for (Collective& call : calls) {
    call.batch = batch;
    entries_.push_back({Entry::Kind::Collective, collectives_.size()});
    collectives_.push_back(call);
  }
  return batch;
}

void Trace::synchronized(const Sync& sync) {
  const std::lock_guard lock(mutex_);
  entries_.push_back({Entry::Kind::Sync, syncs_.size()});
  syncs_.push_back(sync);
}

int64_t Trace::next_event() {
  const std::lock_guard lock(mutex_);
  return ++num_events_;
}

int Trace::add_communicator(std::vector<int> world_ranks) {
  const std::lock_guard lock(mutex_);
  communicators_.push_back(std::move(world_ranks));
  return static_cast<int>(communicators_.size()) - 1;
}

void Trace::set_category(uintptr_t address, Category category) {
  const std::lock_guard lock(mutex_);
  const auto after = in_use_.upper_bound(address);
  if (after == in_use_.begin()) return;
  const auto& [begin, index] = *std::prev(after);
  Allocation& allocation = allocations_[index];
  if (address < begin + static_cast<uintptr_t>(allocation.bytes)) allocation.category = category;
}

}  // namespace titan::plan
