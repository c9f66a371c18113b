#pragma once

// Silent corruption: a memory or a processor that returns something else without saying so. Ranks that have a
// copy of the same part of a parameter (replicated over dp_replicate, tp or cp) compute the same bits for it
// forever; a checksum of each tells when one of them no longer does.

#include <cstdint>
#include <string>
#include <vector>

#include "titan/dist/world.h"
#include "titan/parallel/parameters.h"

namespace titan::train {

/// The sum of the tensor's bits, read as integers of its element size, modulo 2^64: a 0-d int64 tensor on its
/// device. Any one flipped bit changes it, the order of additions doesn't.
at::Tensor bit_sum(const at::Tensor& tensor);

/// Of ranks that have copies of one part, with their sums: the positions that differ from what more than half
/// of them have. All, where no more than half agree; none, where all do.
std::vector<size_t> differing(const std::vector<int64_t>& sums);

/// Compares them and throws UnsoundRun on every rank of the world where any differ: the message names the
/// ranks and, for each mesh, its first parameter that differs. Blocking; collective over the world.
/// `parameters`: all of this rank's.
void check_replicas(const dist::World& world, const std::vector<Parameter>& parameters, int64_t step);

}  // namespace titan::train
