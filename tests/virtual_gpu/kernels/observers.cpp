// LibTorch's observers of the host: its own reads and writes of pinned memory by aten's operations on the CPU (reads through a
// plain pointer can't be seen), and the modules that it is in.

#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

#include "kernels/call.h"

namespace virtual_gpu {
namespace {

std::unique_ptr<at::ObserverContext> check_inputs(const at::RecordFunction& function) {
  const auto& inputs = function.inputs();
  const auto schema = function.operator_schema();
  if (!schema) return nullptr;
  for (size_t i = 0; i < inputs.size() && i < schema->arguments().size(); ++i) {
    const auto* alias = schema->arguments()[i].alias_info();
    for_each_tensor(inputs[i], [&](const at::Tensor& t) {
      if (!t.device().is_cpu() || t.layout() != at::kStrided || !t.has_storage()) return;
      check_host_access(range_of(t, alias && alias->isWrite()), function.name());
    });
  }
  return nullptr;
}

bool is_on_host(const at::RecordFunction& function) {
  bool result = true;
  for (const c10::IValue& input : function.inputs())
    for_each_tensor(input, [&](const at::Tensor& t) { result &= t.device().is_cpu(); });
  return result;
}

// Views only look at shapes, and a copy to or from the device is checked by its stream.
bool touches_memory(const at::RecordFunction& function) {
  const std::string name = function.name();
  if (name.ends_with("copy_")) return is_on_host(function);
  for (const char* part :
       {"view", "as_strided", "slice", "select", "narrow", "detach", "alias", "reshape", "transpose", "empty",
        "record_stream", "aten::to", "is_pinned", "set_", "expand", "unsqueeze", "squeeze", "flatten"})
    if (name.find(part) != std::string::npos) return false;
  return true;
}

std::unique_ptr<at::ObserverContext> at_start(const at::RecordFunction& function) {
  return touches_memory(function) ? check_inputs(function) : nullptr;
}

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  enter_module(function.name());
  return nullptr;
}
void leave(const at::RecordFunction&, at::ObserverContext*) { leave_module(); }

}  // namespace

void watch_modules() {
  at::addGlobalCallback(at::RecordFunctionCallback(enter, leave).scopes({at::RecordScope::USER_SCOPE}));
}

void watch_host_accesses() {
  at::addGlobalCallback(
      at::RecordFunctionCallback(at_start).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace virtual_gpu
