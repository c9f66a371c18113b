#pragma once

// Copies what a rank writes out of the way of training: to a buffer in host memory that is reused for every
// save.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "checkpoint/format/rank_file.h"
#include "checkpoint/save/save_plan.h"
#include "dist/stream.h"

namespace titan::checkpoint::detail {

/// std::memcpy for more than the caches hold: stores bypass them, so that a line isn't read before it is
/// written, which saves a third of the memory traffic. (glibc does the same only above a size that depends on
/// the machine: 252 MB on one with 320 MB of cache.) When it returns, the copy is visible to other threads.
void streaming_copy(void* to, const void* from, size_t num_bytes);

/// Host memory that only grows. Begins at a page; page-locked where a GPU copies to it.
class StagingBuffer {
 public:
  StagingBuffer() = default;
  ~StagingBuffer();
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;

  /// Loses its contents. Throws Error where there is no such memory.
  void reserve(int64_t num_bytes, bool page_locked);
  char* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  void release();

  char* data_ = nullptr;
  int64_t num_bytes_ = 0;
  at::Tensor locked_;  // owner of page-locked memory
};

/// One save's copies. Keeps the tensors alive that it copies from.
class Staging {
 public:
  /// With `in_place`, pieces that are contiguous on the CPU are written from where they are; all others get
  /// their places in `buffer`. Throws Error.
  Staging(const SavePlan& plan, const std::vector<NamedTensor>& tensors, StagingBuffer& buffer,
          bool in_place);

  /// In the plan's order.
  const std::vector<PieceToWrite>& pieces() const { return pieces_; }
  /// Queues the copies from a device, ordered after the current stream's work. By the training thread.
  void launch_from_device();
  /// Makes the copies from host memory, with several threads.
  void copy_from_host(int num_threads) const;
  /// Blocks until all copies are done; called after both of the above.
  void synchronize() const { copied_.synchronize(); }
  /// Later work of the current stream starts after the copies from the device.
  void order_current_stream() const;

 private:
  // Contiguous bytes to contiguous bytes.
  struct BytesCopy {
    const char* from;
    char* to;
    int64_t num_bytes;
  };
  struct TensorCopy {
    at::Tensor from, to;
  };

  void add(const PlannedPiece& piece, const at::Tensor& local, const at::Tensor& target);

  std::vector<PieceToWrite> pieces_;
  std::vector<BytesCopy> bytes_;
  std::vector<TensorCopy> tensors_, device_;
  std::vector<at::Tensor> alive_;
  dist::Event copied_;
};

}  // namespace titan::checkpoint::detail
