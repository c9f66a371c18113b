#pragma once

#include "simt/simt.h"

namespace titan {

template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                   Arguments... arguments) {
  virtual_gpu::simt::launch(grid, block, stream, [=] { kernel(static_cast<Parameters>(arguments)...); });
}

}  // namespace titan
