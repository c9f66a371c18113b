#pragma once

// Plans at the first save which pieces of the job's tensors this rank writes; later saves only check that the
// tensors are still the same. Each save copies these pieces to a reused buffer in host memory, so that
// training can continue.

#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>

#include "checkpoint/format/rank_file.h"
#include "dist/stream.h"
#include "titan/checkpoint/checkpointer.h"

namespace titan::checkpoint::detail {

/// A tensor of an object under its name in the checkpoint: "model.norm.weight".
struct NamedTensor {
  std::string name;
  DTensor data;
  bool duplicate = false;
};

/// An object's state under its key.
struct KeyedState {
  std::string key;
  ObjectState state;
};

/// The tensors of all states. Throws Error for one without memory, and one whose local part doesn't match its
/// box.
std::vector<NamedTensor> tensors_of(const std::vector<KeyedState>& states);

/// This rank's share of writing one tensor: rows of its local part.
struct PlannedPiece {
  std::string name;
  Box box;                     // in the global tensor
  size_t source = 0;           // position in the list of tensors that the plan was made from
  std::vector<int64_t> start;  // position in the local part
  bool is_whole_rows = false;  // cut along the first dimension alone: contiguous where the local part is
  int64_t num_bytes = 0;
};

/// The texts that the ranks of a pipeline send each other. encode_stage makes one from a stage's tensors;
/// decode_stages joins all stages' tensors, and throws Error for a text that ends early.
std::string encode_stage(const std::vector<StateTensor>& tensors);
std::vector<StateTensor> decode_stages(const std::vector<std::string>& texts);

class SavePlan {
 public:
  /// Collective over the pipeline, whose stages exchange their lists of tensors. Throws Error.
  SavePlan(const std::vector<NamedTensor>& tensors, const dist::World& world, const DeviceMesh& pipeline);

  const StateTable& table() const { return table_; }
  const std::vector<PlannedPiece>& pieces() const { return pieces_; }
  /// Equal on ranks that planned the same.
  std::string digest() const;
  /// Throws Error if these aren't the tensors that the plan was made from; their memory may differ.
  void check_same(const std::vector<NamedTensor>& tensors) const;

 private:
  struct Known {
    std::string name;
    at::ScalarType dtype;
    std::vector<int64_t> global_shape;
    Box box;
    bool duplicate;
  };

  std::vector<Known> known_;
  StateTable table_;
  std::vector<PlannedPiece> pieces_;
};

/// A piece's elements, sharing memory with the tensor.
at::Tensor part_of(const at::Tensor& local, const PlannedPiece& piece);

// ---- copying

/// std::memcpy for more data than the caches hold: stores bypass the caches, so that a line isn't read before
/// it is written, which saves a third of the memory traffic. (glibc does the same only above a size that
/// depends on the machine: 252 MB on one with 320 MB of cache.) When it returns, the copy is visible to other
/// threads.
void streaming_copy(void* to, const void* from, size_t num_bytes);

/// The host memory that a save's copies need.
struct StagingNeed {
  int64_t num_bytes = 0;
  bool page_locked = false;      ///< a GPU copies to it
  std::vector<int64_t> offsets;  ///< each piece's place; -1: it is written from the tensor's own memory
};

/// With `in_place`, pieces that are contiguous on the CPU need no copy.
StagingNeed staging_need(const SavePlan& plan, const std::vector<NamedTensor>& tensors, bool in_place);

/// Host memory that only grows. It begins at a page boundary. It isn't LibTorch's page-locked memory, which
/// takes the next power of two: 16 GiB for 12.
class StagingBuffer {
 public:
  StagingBuffer() = default;
  ~StagingBuffer();
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;

  /// Discards the contents. Throws Error if the memory isn't available.
  void reserve(const StagingNeed& need);
  /// Begins to reserve on another thread, because locking pages takes seconds. The next reserve() waits for
  /// it, and reports what prevented it.
  void reserve_early(StagingNeed need);
  char* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  void take(const StagingNeed& need);
  void release();

  char* data_ = nullptr;
  int64_t num_bytes_ = 0;
  bool is_locked_ = false;
  std::thread early_;
};

/// One save's copies. Keeps alive the tensors that it copies from.
class Staging {
 public:
  /// With `in_place`, pieces that are contiguous on the CPU are written from the tensors' own memory; all
  /// others are copied to `buffer`. Throws Error.
  Staging(const SavePlan& plan, const std::vector<NamedTensor>& tensors, StagingBuffer& buffer,
          bool in_place);

  /// In the plan's order.
  const std::vector<PieceToWrite>& pieces() const { return pieces_; }
  /// Queues the copies from a device, ordered after the current stream's work. Called by the training thread.
  void launch_from_device();
  /// Makes the copies from host memory, with several threads.
  void copy_from_host(int num_threads) const;
  /// Blocks until all copies are done; called after both of the above.
  void synchronize() const { copied_.synchronize(); }
  /// Later work of the current stream starts after the copies from the device.
  void order_current_stream() const;

 private:
  // A copy of contiguous bytes to contiguous bytes.
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
