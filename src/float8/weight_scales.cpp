#include "float8/weight_scales.h"

#include <algorithm>

namespace titan::float8 {

at::Tensor WeightScales::of(const at::Tensor& weight, int64_t kind, const std::function<at::Tensor()>& make) {
  if (weight.is_inference()) return make();  // has no version
  const auto version = static_cast<uint64_t>(weight._version());
  c10::StorageImpl* memory = weight.storage().unsafeGetStorageImpl();
  const int64_t offset = weight.storage_offset();
  const std::lock_guard lock(mutex_);
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.kind == kind; });
  const bool known = found != entries_.end();
  if (known && found->storage._unsafe_get_target() == memory && found->offset == offset &&
      found->version == version)
    return found->scale;
  Entry made{kind, Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(memory)), offset, version,
             make()};
  const at::Tensor scale = made.scale;
  if (known) {
    *found = std::move(made);
  } else {
    entries_.push_back(std::move(made));
  }
  return scale;
}

}  // namespace titan::float8
