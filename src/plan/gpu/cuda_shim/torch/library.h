#pragma once

// Operations are registered when a planned device is opened, not when the library is: a real device has the plugin's own.

#include_next <torch/library.h>

#include "plan/gpu/planned_gpu.h"

#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY_IMPL(ns, key, library)                                                  \
  static void register_planned_operations(torch::Library& library);                           \
  [[maybe_unused]] static const bool operations_are_listed =                                  \
      titan::plan::list_operations(#ns, c10::DispatchKey::key, &register_planned_operations); \
  static void register_planned_operations(torch::Library& library)
