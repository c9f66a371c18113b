#pragma once

// The record of all that a planned device is given: allocations, launches, collectives, and what waits for what, in the order of the
// program's calls.

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/core/ScalarType.h>

#include "observe/operation_costs.h"

namespace titan::plan {

enum class Category : uint8_t {
  Parameters,  ///< this rank's shards
  Gathered,    ///< whole parameters in the compute dtype, and buffers of their gathers
  Gradients,   ///< whole and of shards
  Optimizer,
  Activations,  ///< also temporary tensors of operations
  Buffers,
  Communication,  ///< buffers of activations between ranks
};
constexpr int kNumCategories = 7;
/// "parameters", ...
const char* name_of(Category category);

struct Allocation {
  int64_t bytes = 0;  ///< the size of its block
  int64_t stream = 0;
  int module = 0;  ///< Trace::name()
  Category category = Category::Activations;
};

/// The names of launches that are copies over the host's bus.
constexpr const char* kCopyToHost = "cudaMemcpyAsync to the host";
constexpr const char* kCopyToDevice = "cudaMemcpyAsync to the device";
/// That of a product in Float8 that is added to a sum.
constexpr const char* kAddedProduct = "cublasLtMatmul";

struct Launch {
  int name = 0;  ///< "aten::mm", "rms_norm_kernel"
  int module = 0;
  int64_t stream = 0;
  double flops = 0, bytes_read = 0, bytes_written = 0;
  c10::ScalarType dtype = c10::ScalarType::Undefined;  ///< the operands', if it has FLOPs
  train::ProductShape shape{};                         ///< if it has FLOPs
};

struct Collective {
  int op = 0;            ///< "all_gather"
  int group = 0;         ///< its name
  int communicator = 0;  ///< which of the groups of this name
  int group_size = 0;
  int label = 0;  ///< the program's name for the call: "fsdp::all_gather layers.3"
  int module = 0;
  int peer = -1;       ///< world rank of the other side of a send or receive
  int64_t stream = 0;  ///< that it was called on
  int64_t bytes = 0;   ///< the larger of input and output
  int num_tensors = 1;
  int batch = 0;  ///< calls of one batch have the same number, and end together
};

/// A stream or the host waits, or a stream reaches a point that others may wait for.
struct Sync {
  enum class Kind : uint8_t {
    Record,      ///< `number` is the event's, new for each record
    Wait,        ///< the stream, for event `number`
    WaitCall,    ///< the stream, for the collectives of batch `number`
    HostEvent,   ///< the host, for event `number`
    HostStream,  ///< the host, for all that was queued on the stream
    BeginGraph,  ///< the following entries are recorded: their launch as a whole takes the host next to nothing
    EndGraph
  };
  Kind kind;
  int64_t stream = 0;
  int64_t number = 0;
};

struct Entry {
  enum class Kind : uint8_t { Allocate, Free, Launch, Collective, Sync, Step };
  Kind kind;
  size_t index;  ///< in the list of its kind; of a step: its number
};

/// Thread-safe while it is written; the lists are read when the rehearsal is over.
class Trace {
 public:
  /// Numbers texts, so that entries are small.
  int number_of(const std::string& text);
  const std::string& name(int number) const { return names_[static_cast<size_t>(number)]; }

  /// A step of a rank that computes on `stream`.
  void begin_step(int64_t stream = 0);
  void allocated(uintptr_t address, const Allocation& allocation);
  void freed(uintptr_t address);
  void launched(const Launch& launch);
  /// Calls that run as one, on a stream of the group's own, after what has been queued on theirs. Returns the batch's number.
  int called(std::vector<Collective> calls);
  void synchronized(const Sync& sync);
  /// A new event's number.
  int64_t next_event();
  /// Numbers a group, by the world ranks of its members.
  int add_communicator(std::vector<int> world_ranks);
  /// The block that holds the address, now in use, is of this category.
  void set_category(uintptr_t address, Category category);

  const std::vector<Entry>& entries() const { return entries_; }
  const std::vector<Allocation>& allocations() const { return allocations_; }
  const std::vector<Launch>& launches() const { return launches_; }
  const std::vector<Collective>& collectives() const { return collectives_; }
  const std::vector<Sync>& syncs() const { return syncs_; }
  const std::vector<int>& members(int communicator) const {
    return communicators_[static_cast<size_t>(communicator)];
  }
  int num_steps() const { return num_steps_; }
  /// The one of the last begin_step().
  int64_t computing_stream() const { return computing_stream_; }

 private:
  std::mutex mutex_;
  std::deque<std::string> names_;
  std::unordered_map<std::string, int> numbers_;
  std::map<uintptr_t, size_t> in_use_;
  std::vector<Entry> entries_;
  std::vector<Allocation> allocations_;
  std::vector<Launch> launches_;
  std::vector<Collective> collectives_;
  std::vector<Sync> syncs_;
  std::deque<std::vector<int>> communicators_;
  int num_batches_ = 0;
  int64_t num_events_ = 0;
  int num_steps_ = 0;
  int64_t computing_stream_ = 0;
};

}  // namespace titan::plan
