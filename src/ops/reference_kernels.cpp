#include "ops/reference_kernels.h"

#include <atomic>
#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

namespace titan::ops {

namespace {

void run_composite(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
}

// The dispatcher warns of each kernel that another one replaces, which is the purpose here.
class NoWarnings : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::atomic<int> num_objects = 0;

}  // namespace

bool ReferenceKernels::in_use() { return num_objects > 0; }

ReferenceKernels::ReferenceKernels() {
  NoWarnings no_warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&no_warnings);
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::DispatchKey key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "titan", key, __FILE__, __LINE__);
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (!name.name.starts_with("titan::")) continue;
      const auto op = dispatcher.findOp(name);
      if (op && op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd))
        library->impl(name.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_composite>());
    }
    registrations_.push_back(std::move(library));
  }
  ++num_objects;
}

ReferenceKernels::~ReferenceKernels() { --num_objects; }

}  // namespace titan::ops
