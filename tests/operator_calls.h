#pragma once

#include <map>
#include <memory>
#include <string>

#include <ATen/record_function.h>
#include <torch/csrc/autograd/variable.h>

namespace titan::testing {

/// How often the backward from `out` calls each operator on this thread.
inline std::map<std::string, int> operators_of_backward(const at::Tensor& out) {
  static std::map<std::string, int> calls;  // a callback captures nothing
  calls.clear();
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
        ++calls[call.name()];
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  out.backward();
  at::removeCallback(handle);
  return calls;
}

}  // namespace titan::testing
