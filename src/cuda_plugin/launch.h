#pragma once

// The launch of a kernel. tests/virtual_gpu/simt/cuda_plugin/launch.h takes this header's place where kernels are compiled for
// the host, because <<<...>>> isn't C++.

#include <cuda_runtime_api.h>

namespace titan {

/// Queues kernel(arguments...) on the stream.
template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                   Arguments... arguments) {
  kernel<<<grid, block, 0, stream>>>(arguments...);
}

}  // namespace titan
