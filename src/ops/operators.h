#pragma once

// Calls of our operations through the dispatcher; handles are looked up once.

#include <ATen/core/dispatch/Dispatcher.h>

namespace titan::ops {

template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace titan::ops
