#pragma once

// Finds the tensors among a call's arguments or results: at::Tensor, std::optional, std::vector, std::pair
// and std::tuple of them, nested. A struct joins by a member `template <class F> void for_each_tensor(F&&)`.

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "titan/core/error.h"
#include "titan/nn/hooks.h"

namespace titan::nn {

namespace detail {

inline void collect(TensorRefs& refs, at::Tensor& tensor) {
  if (tensor.defined()) refs.push_back(&tensor);
}
template <class T>
void collect(TensorRefs& refs, std::optional<T>& value);
template <class T>
void collect(TensorRefs& refs, std::vector<T>& values);
template <class... Ts>
void collect(TensorRefs& refs, std::tuple<Ts...>& values);
template <class A, class B>
void collect(TensorRefs& refs, std::pair<A, B>& values);
template <class T>
void collect(TensorRefs& refs, T& value) {
  if constexpr (requires { value.for_each_tensor([](at::Tensor&) {}); })
    value.for_each_tensor([&](at::Tensor& tensor) { collect(refs, tensor); });
}

template <class T>
void collect(TensorRefs& refs, std::optional<T>& value) {
  if (value) collect(refs, *value);
}
template <class T>
void collect(TensorRefs& refs, std::vector<T>& values) {
  for (auto&& value : values) {
    if constexpr (std::is_lvalue_reference_v<decltype(value)>) collect(refs, value);
  }
}
template <class... Ts>
void collect(TensorRefs& refs, std::tuple<Ts...>& values) {
  std::apply([&](auto&... each) { (collect(refs, each), ...); }, values);
}
template <class A, class B>
void collect(TensorRefs& refs, std::pair<A, B>& values) {
  collect(refs, values.first);
  collect(refs, values.second);
}

}  // namespace detail

template <class T>
TensorRefs tensor_refs(T& value) {
  TensorRefs refs;
  detail::collect(refs, value);
  return refs;
}

inline TensorList tensor_values(const TensorRefs& refs) {
  TensorList values;
  values.reserve(refs.size());
  for (at::Tensor* tensor : refs) values.push_back(*tensor);
  return values;
}

inline void replace_tensors(const TensorRefs& refs, const TensorList& values) {
  TITAN_INTERNAL_ASSERT(refs.size() == values.size(), "a call has ", refs.size(), " tensors, ", values.size(),
                        " came back");
  for (size_t i = 0; i < values.size(); ++i) *refs[i] = values[i];
}

}  // namespace titan::nn
