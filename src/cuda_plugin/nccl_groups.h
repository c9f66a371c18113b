#pragma once

#include <functional>
#include <memory>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "dist/device_backend.h"

namespace titan::dist {

// A queued receive holds a multiprocessor for each CTA until its message has come; NCCL would take up to 32. Four keep up with a network of
// 400 Gb/s, and a message of 50 MB within a host takes tenths of a millisecond. A pipeline's schedule hides that, and a ring's blocks of attention hide longer ones.
constexpr int kMostCtasOfLongReceives = 4;

/// Makes LibTorch's allocator give its unused memory back if the driver has less than `bytes` left, because what others
/// request from the driver doesn't reach the allocator.
void leave_to_driver(int64_t bytes);
/// Connects. All members have to come within the group's time limit.
c10::intrusive_ptr<c10d::Backend> make_nccl_group(const GroupSpec& spec);
/// DeviceBackend::abort_groups().
void abort_nccl_groups();
/// DeviceBackend::finish_calls().
void finish_calls_of_nccl();
/// DeviceBackend::completion_of().
std::function<DeviceCall()> completion_of_nccl(c10d::Work& work);
std::unique_ptr<RegisteredMemory> make_memory_of_nccl();

}  // namespace titan::dist
