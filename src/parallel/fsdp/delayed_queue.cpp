#include "parallel/fsdp/delayed_queue.h"

#include <unordered_set>

#include "parallel/fsdp/param_group.h"

namespace titan::fsdp {

void DelayedQueue::add(std::shared_ptr<ParamGroup> group, size_t slot, ops::WeightGrad grad) {
  entries_.push_back({std::move(group), slot, std::move(grad)});
}

void DelayedQueue::add(std::shared_ptr<ParamGroup> group, size_t slot, ops::DueGradient gradient) {
  entries_.push_back({std::move(group), slot, {}, std::move(gradient)});
}

// Each entry goes when it is computed, so that memory falls on the way.
void DelayedQueue::compute() {
  for (Entry& entry : entries_) {
    const Entry due = std::move(entry);
    entry = {};
    due.group->take_grad(due.slot, due.other.compute ? due.other.compute() : due.product.compute(), {});
  }
  entries_.clear();
}

int64_t DelayedQueue::bytes() const {
  std::unordered_set<const void*> seen;
  int64_t total = 0;
  const auto count = [&](const at::Tensor& tensor) {
    if (tensor.defined() && seen.insert(tensor.storage().unsafeGetStorageImpl()).second)
      total += static_cast<int64_t>(tensor.storage().nbytes());
  };
  for (const Entry& entry : entries_) {
    for (const ops::Operand* operand : {&entry.product.grad_output_NO, &entry.product.input_NI})
      for (const at::Tensor* tensor :
           {&operand->values, &operand->along_rows.data, &operand->down_columns.data})
        count(*tensor);
    for (const at::Tensor& tensor : entry.other.reads) count(tensor);
  }
  return total;
}

}  // namespace titan::fsdp
