#include "float8/weight_scales.h"

#include <algorithm>

namespace titan::float8 {

at::Tensor WeightScales::of(const at::Tensor& weight, int64_t kind, const std::function<at::Tensor()>& make) {
  if (weight.is_inference()) return make();  // has no version
  const auto version = static_cast<uint64_t>(weight._version());
  c10::StorageImpl* memory = weight.storage().unsafeGetStorageImpl();
  const std::lock_guard lock(mutex_);
  auto [at, is_new] =
      weights_.try_emplace(memory, Weights{c10::weak_intrusive_ptr<c10::StorageImpl>(
                                               c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(memory)),
                                           {}});
  std::vector<Entry>& entries = at->second.entries;
  const auto found = std::find_if(entries.begin(), entries.end(), [&](const Entry& entry) {
    return entry.kind == kind && entry.offset == weight.storage_offset();
  });
  if (found != entries.end() && found->version == version) return found->scale;
  const Entry made{kind, weight.storage_offset(), version, make()};
  if (found == entries.end()) {
    entries.push_back(made);
  } else {
    *found = made;
  }
  return made.scale;
}

}  // namespace titan::float8
