#include "box_runs.h"

#include <algorithm>

#include <c10/util/ArrayRef.h>

namespace titan::checkpoint::detail {

BoxRuns::BoxRuns(const Box& source, const Box& target, at::IntArrayRef target_strides) {
  int64_t from_stride = 1;
  for (size_t dim = source.offset.size(); dim-- > 0;) {
    const int64_t begin = std::max(source.offset[dim], target.offset[dim]);
    const int64_t end =
        std::min(source.offset[dim] + source.length[dim], target.offset[dim] + target.length[dim]);
    if (end <= begin) {
      done_ = true;
      return;
    }
    from_ += (begin - source.offset[dim]) * from_stride;
    to_ += (begin - target.offset[dim]) * target_strides[dim];
    add_outer({end - begin, from_stride, target_strides[dim]});
    from_stride *= source.length[dim];
  }
  // Every run is in a row in the source, if need be of one element.
  if (dims_.empty() || dims_[0].from_stride != 1) dims_.insert(dims_.begin(), {1, 1, 1});
  index_.resize(dims_.size());
}

void BoxRuns::add_outer(Dim dim) {
  if (dim.length == 1) return;
  const bool continues = !dims_.empty() &&
                         dims_.back().length * dims_.back().from_stride == dim.from_stride &&
                         dims_.back().length * dims_.back().to_stride == dim.to_stride;
  if (continues) {
    dims_.back().length *= dim.length;
  } else {
    dims_.push_back(dim);
  }
}

bool BoxRuns::next(Run& run) {
  if (done_) return false;
  run = {from_, to_, dims_[0].length, dims_[0].to_stride};
  for (size_t i = 1; i < dims_.size(); ++i) {
    const Dim& dim = dims_[i];
    from_ += dim.from_stride;
    to_ += dim.to_stride;
    if (++index_[i] < dim.length) return true;
    from_ -= dim.length * dim.from_stride;
    to_ -= dim.length * dim.to_stride;
    index_[i] = 0;
  }
  done_ = true;
  return true;
}

}  // namespace titan::checkpoint::detail
