#pragma once

// The record of all that a planned device is given: allocations, launches and collectives, in the order of the program's calls.

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/core/ScalarType.h>

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

struct Launch {
  int name = 0;  ///< "aten::mm", "rms_norm_kernel"
  int module = 0;
  int64_t stream = 0;
  double flops = 0, bytes_read = 0, bytes_written = 0;
  c10::ScalarType dtype = c10::ScalarType::Undefined;  ///< the operands', if it has FLOPs
};

struct Collective {
  int op = 0;  ///< "all_gather"
  int group = 0;
  int group_size = 0;
  int label = 0;  ///< the program's name for the call: "fsdp::all_gather layers.3"
  int module = 0;
  int peer = -1;       ///< group rank of the other side of a send or receive
  int64_t stream = 0;  ///< that it was called on
  int64_t bytes = 0;   ///< the larger of input and output
};

struct Entry {
  enum class Kind : uint8_t { Allocate, Free, Launch, Collective, Step };
  Kind kind;
  size_t index;  ///< in the list of its kind; of a step: its number
};

/// Thread-safe while it is written; the lists are read when the rehearsal is over.
class Trace {
 public:
  /// Numbers texts, so that entries are small.
  int number_of(const std::string& text);
  const std::string& name(int number) const { return names_[static_cast<size_t>(number)]; }

  void begin_step();
  void allocated(uintptr_t address, const Allocation& allocation);
  void freed(uintptr_t address);
  void launched(const Launch& launch);
  void called(const Collective& call);
  /// The block that holds the address, now in use, is of this category.
  void set_category(uintptr_t address, Category category);

  const std::vector<Entry>& entries() const { return entries_; }
  const std::vector<Allocation>& allocations() const { return allocations_; }
  const std::vector<Launch>& launches() const { return launches_; }
  const std::vector<Collective>& collectives() const { return collectives_; }
  int num_steps() const { return num_steps_; }

 private:
  std::mutex mutex_;
  std::deque<std::string> names_;
  std::unordered_map<std::string, int> numbers_;
  std::map<uintptr_t, size_t> in_use_;
  std::vector<Entry> entries_;
  std::vector<Allocation> allocations_;
  std::vector<Launch> launches_;
  std::vector<Collective> collectives_;
  int num_steps_ = 0;
};

}  // namespace titan::plan
