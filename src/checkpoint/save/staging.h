#pragma once

// memcpy of more than the caches hold until somebody reads it again.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "checkpoint/format/rank_file.h"
#include "checkpoint/save/save_plan.h"
#include "titan/dist/stream.h"

namespace titan::checkpoint::detail {

/// As std::memcpy, but stores go past the caches: a line isn't read before it is written, which is a third of
/// the memory's traffic. (glibc does the same only from a size on that it takes from the machine: 252 MB on
/// one with 320 MB of cache.) Done when it returns, for other threads that hear of it too.
void streaming_copy(void* to, const void* from, size_t num_bytes);

// What a rank writes, out of the way of training: a buffer in host memory that is made once, and the copies
// to it.

/// Host memory that only grows. From the start of a page; page-locked where a GPU copies to it.
class StagingBuffer {
 public:
  StagingBuffer() = default;
  ~StagingBuffer();
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;

  /// What it held is lost. Throws Error where there is no such memory.
  void reserve(int64_t num_bytes, bool page_locked);
  char* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  void release();

  char* data_ = nullptr;
  int64_t num_bytes_ = 0;
  at::Tensor locked_;  // owner of page-locked memory
};

/// One save's copies. Holds the tensors that they are made of.
class Staging {
 public:
  /// Pieces in `plan`'s order: those that can be written from where they are (`in_place`: contiguous, on the
  /// CPU), and the others, which get their places in `buffer`. Throws Error.
  Staging(const SavePlan& plan, const std::vector<NamedTensor>& tensors, StagingBuffer& buffer,
          bool in_place);

  const std::vector<PieceToWrite>& pieces() const { return pieces_; }
  /// Queues the copies from a device, ordered behind the current stream's work. By the thread that trains.
  void launch_from_device();
  /// Makes the copies from host memory, by several threads.
  void copy_from_host(int num_threads) const;
  /// Blocks until all copies are done; called behind both of the above.
  void synchronize() const { copied_.synchronize(); }
  /// Later work of the current stream starts behind the copies from the device.
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
