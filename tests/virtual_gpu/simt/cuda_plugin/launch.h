#pragma once

#include "simt/simt.h"

namespace titan {

template <class... Parameters, class... Arguments>
void launch_named_kernel(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                         cudaStream_t stream, Arguments... arguments) {
  const auto run = [=]() __attribute__((no_sanitize("thread"))) {
    virtual_gpu::simt::enter_kernel();
    kernel(static_cast<Parameters>(arguments)...);
  };
  virtual_gpu::simt::launch({name, reinterpret_cast<const void*>(kernel), grid, block, run}, stream);
}
// Its first argument's text names the kernel.
#define launch_kernel(...) launch_named_kernel(#__VA_ARGS__, __VA_ARGS__)

}  // namespace titan
