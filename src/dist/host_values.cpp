// Small values of the host, over the same groups: counts, sums for the log, texts.

#include <algorithm>
#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "titan/core/error.h"
#include "titan/dist/collectives.h"

namespace titan::dist {
namespace {

template <class T>
T reduce(Group& group, T value, ReduceOp op, Label label) {
  if (group.size() == 1) return value;
  at::Tensor tensor = at::empty({1}, c10::CppTypeToScalarType<T>::value);
  *tensor.data_ptr<T>() = value;
  group.all_reduce(tensor, op, label).wait();
  return *tensor.data_ptr<T>();
}

std::vector<int64_t> all_gather_sizes(Group& group, int64_t size, Label label) {
  at::Tensor mine = at::full({1}, size, at::kLong), all = at::zeros({group.size()}, at::kLong);
  group.all_gather(all, mine, label).wait();
  const auto* first = all.data_ptr<int64_t>();
  return {first, first + group.size()};
}

}  // namespace

double Group::sum(double value, Label label) { return reduce(*this, value, ReduceOp::Sum, label); }
double Group::max(double value, Label label) { return reduce(*this, value, ReduceOp::Max, label); }
int64_t Group::sum(int64_t value, Label label) { return reduce(*this, value, ReduceOp::Sum, label); }

std::vector<std::string> Group::all_gather_text(const std::string& text, Label label) {
  if (size() == 1) return {text};
  const auto sizes = all_gather_sizes(*this, static_cast<int64_t>(text.size()), label);
  const int64_t longest = std::max<int64_t>(1, *std::max_element(sizes.begin(), sizes.end()));
  at::Tensor mine = at::zeros({longest}, at::kByte), all = at::empty({size() * longest}, at::kByte);
  std::memcpy(mine.data_ptr(), text.data(), text.size());
  all_gather(all, mine, label).wait();
  const auto* bytes = static_cast<const char*>(all.data_ptr());
  std::vector<std::string> texts;
  for (int i = 0; i < size(); ++i) texts.emplace_back(bytes + i * longest, static_cast<size_t>(sizes[i]));
  return texts;
}

}  // namespace titan::dist
