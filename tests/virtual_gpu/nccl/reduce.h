#pragma once

#include <nccl.h>

#include <cstddef>

namespace virtual_gpu {

size_t bytes_of(ncclDataType_t type);

struct Reduction {
  ncclRedOp_t op = ncclSum;
  double factor = 1;  ///< for each input, in reductions made by ncclRedOpCreatePreMulSum
};

/// Reduces `count` elements of each source, in the order of the ranks. 16-bit types are summed in float.
void reduce(ncclDataType_t type, Reduction reduction, const char* const* sources, int num_sources, char* to,
            size_t count);

double scalar_from(ncclDataType_t type, const void* value);

}  // namespace virtual_gpu
