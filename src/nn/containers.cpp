#include "titan/nn/containers.h"

#include <algorithm>

#include "titan/core/error.h"

namespace titan::nn {

ptrdiff_t LayerList::note_erased(const std::string& name) {
  const auto found = std::find(names_.begin(), names_.end(), name);
  TITAN_CHECK(found != names_.end(), "there is no element '", name, "' to erase");
  const ptrdiff_t position = found - names_.begin();
  if (position == 0) ++first_number_;
  names_.erase(found);
  return position;
}

void SequentialImpl::erase(const std::string& name) {
  calls_.erase(calls_.begin() + note_erased(name));
  unregister_module(name);
}

at::Tensor SequentialImpl::forward(const at::Tensor& x) {
  check_entered_through_ref();
  at::Tensor y = x;
  for (const auto& call : calls_) y = call(y);
  return y;
}

}  // namespace titan::nn
