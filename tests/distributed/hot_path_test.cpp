// Forwards and backwards of a settled model build, hash and look up no strings, in all modules that have
// collectives, and in Float8. For these, libtitan_train calls libstdc++ and libc, and the calls are
// intercepted here; calls from LibTorch, or from this program, don't count. The test doesn't detect strings
// of up to fifteen characters that are never compared, strings that stay or are freed by another thread, or
// maps with other keys. The model also reads no number from a tensor by item() and the like, for which the
// host would wait for a device. Copies to the host and reads of its memory aren't detected.

#include <execinfo.h>
#include <link.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/record_function.h>

#include "dist/environment.h"
#include "distributed/float8_units.h"
#include "distributed/pipeline_case.h"
#include "titan/core/error.h"
#include "titan/float8/convert.h"
#include "titan/parallel/context_parallel.h"

namespace {

/// The address range of an object's code.
struct Code {
  uintptr_t begin = 0, end = 0;
  bool has(const void* address) const {
    const auto at = reinterpret_cast<uintptr_t>(address);
    return at >= begin && at < end;
  }
};

/// The first loaded object whose path contains `part`; "" is the program itself.
Code code_of(const char* part) {
  struct Search {
    const char* part;
    Code code;
  } search{part, {}};
  ::dl_iterate_phdr(
      [](dl_phdr_info* object, size_t /*size*/, void* into) {
        auto& found = *static_cast<Search*>(into);
        const bool is_it = *found.part == 0 ? *object->dlpi_name == 0
                                            : std::strstr(object->dlpi_name, found.part) != nullptr;
        if (!is_it) return 0;
        for (int i = 0; i < object->dlpi_phnum; ++i) {
          const auto& header = object->dlpi_phdr[i];
          if (header.p_type != PT_LOAD || (header.p_flags & PF_X) == 0) continue;
          const uintptr_t begin = object->dlpi_addr + header.p_vaddr;
          found.code = {begin, begin + header.p_memsz};
        }
        return 1;
      },
      &search);
  return search.code;
}

constexpr int kDepth = 24;
struct Stack {
  void* frames[kDepth] = {};
  int depth = 0;
};

/// Memory that libtitan allocated by operator new.
struct Memory {
  const char* bytes = nullptr;
  size_t size = 0;
  Stack stack;
};

/// The calls seen on all threads: on a GPU, a backward runs on autograd's.
struct Seen {
  Code libtitan = code_of("libtitan_train.so"), libstdcxx = code_of("libstdc++.so"), program = code_of("");
  int64_t made = 0, compared = 0, hashed = 0;
  const char* first = nullptr;
  Stack first_stack;
  std::string first_text;
  std::vector<Memory> memory;  // not freed yet
};
std::atomic<Seen*> seen{nullptr};
/// Lets one call be looked at after the other. No std::mutex, because virtual GPUs look at those, under a lock of their own,
/// and allocate memory then.
class Turns {
 public:
  void lock() {
    while (taken_.test_and_set(std::memory_order_acquire)) taken_.wait(true, std::memory_order_relaxed);
  }
  void unlock() {
    taken_.clear(std::memory_order_release);
    taken_.notify_one();
  }

 private:
  std::atomic_flag taken_;
};
Turns seen_turns;
thread_local bool is_looking = false;

/// Whether this thread is the one that computes for a virtual GPU. It runs none of LibTitan's code, but allocates much.
bool is_device() {
  static thread_local const bool is_it = [] {
    char name[16] = {};
    prctl(PR_GET_NAME, name);
    return std::strcmp(name, "virtual_gpu") == 0;
  }();
  return is_it;
}

/// This thread's calls aren't counted while this object exists. It is empty if nothing is being watched.
class Looking {
 public:
  Looking() : was_looking_(std::exchange(is_looking, true)) {
    if (was_looking_ || seen == nullptr || is_device()) return;
    seen_turns.lock();
    seen_ = seen;
    if (seen_ == nullptr) seen_turns.unlock();
  }
  ~Looking() {
    if (seen_ != nullptr) seen_turns.unlock();
    is_looking = was_looking_;
  }
  Looking(const Looking&) = delete;
  Looking& operator=(const Looking&) = delete;
  explicit operator bool() const { return seen_ != nullptr; }
  Seen* operator->() const { return seen_; }
  Seen& operator*() const { return *seen_; }

 private:
  const bool was_looking_;
  Seen* seen_ = nullptr;
};

/// Whether the call is from libtitan, directly or through libstdc++.
bool is_libtitans(const Seen& seen, const Stack& stack) {
  int caller = 0;
  while (caller < stack.depth &&
         (seen.program.has(stack.frames[caller]) || seen.libstdcxx.has(stack.frames[caller])))
    ++caller;
  return caller < stack.depth && seen.libtitan.has(stack.frames[caller]);
}

void note(Seen& seen, const char* what, const Stack& stack, std::string text = "") {
  if (seen.first != nullptr) return;
  seen.first = what;
  seen.first_stack = stack;
  seen.first_text = std::move(text);
}

void note_here(Seen& seen, const char* what) {
  Stack stack;
  stack.depth = ::backtrace(stack.frames, kDepth);
  note(seen, what, stack);
}

void see(const char* what, int64_t Seen::*count) {
  const Looking looking;
  if (!looking) return;
  Stack stack;
  stack.depth = ::backtrace(stack.frames, kDepth);
  if (!is_libtitans(*looking, stack)) return;
  ++((*looking).*count);
  note(*looking, what, stack);
}

bool is_printable(const char* text, size_t size) {
  return std::all_of(text, text + size, [](char letter) { return letter >= ' ' && letter <= '~'; });
}

void see_new(void* memory, size_t size) {
  const Looking looking;
  // Shorter strings are stored in the string object.
  if (!looking || size <= 16) return;
  // It may have been freed by a call that wasn't looked at.
  std::erase_if(looking->memory, [memory](const Memory& one) { return one.bytes == memory; });
  Memory got{static_cast<const char*>(memory), size, {}};
  got.stack.depth = ::backtrace(got.stack.frames, kDepth);
  if (!is_libtitans(*looking, got.stack)) return;
  std::memset(memory, 0, size);
  looking->memory.push_back(got);
}

/// Memory of a string, unlike that of numbers and pointers, starts with eight or more printable characters
/// and a zero.
void look_for_text(Seen& seen, const Memory& memory) {
  const char* end = memory.bytes;
  while (end < memory.bytes + memory.size && *end >= ' ' && *end <= '~') ++end;
  if (end - memory.bytes < 8 || end == memory.bytes + memory.size || *end != 0) return;
  ++seen.made;
  note(seen, "a string was built", memory.stack, std::string(memory.bytes, end));
}

void see_delete(const void* memory) {
  const Looking looking;
  if (!looking || memory == nullptr) return;
  const auto found = std::find_if(looking->memory.begin(), looking->memory.end(),
                                  [memory](const Memory& one) { return one.bytes == memory; });
  if (found == looking->memory.end()) return;
  look_for_text(*looking, *found);
  *found = looking->memory.back();
  looking->memory.pop_back();
}

}  // namespace

// These replace the libraries' functions and do the same.
void* operator new(size_t size) {
  void* const memory = std::malloc(std::max<size_t>(size, 1));
  if (memory == nullptr) throw std::bad_alloc();
  see_new(memory, size);
  return memory;
}
void operator delete(void* memory) noexcept {
  see_delete(memory);
  std::free(memory);
}
void operator delete(void* memory, size_t /*size*/) noexcept { operator delete(memory); }

// Used by std::map and std::set with string keys, and by == of strings. Sizes and strides are also compared
// with it, but these are numbers, whose bytes aren't letters.
extern "C" int memcmp(const void* a, const void* b, size_t size) {
  const auto* left = static_cast<const unsigned char*>(a);
  const auto* right = static_cast<const unsigned char*>(b);
  if (seen != nullptr && is_printable(static_cast<const char*>(a), size) &&
      is_printable(static_cast<const char*>(b), size))
    see("strings were compared", &Seen::compared);
  for (size_t i = 0; i < size; ++i)
    if (left[i] != right[i]) return left[i] < right[i] ? -1 : 1;
  return 0;
}
// libstdc++ calls it in dynamic_cast, with the names of types.
extern "C" int strcmp(const char* a, const char* b) {
  if (const Looking looking; looking && looking->libtitan.has(__builtin_return_address(0))) {
    ++looking->compared;
    note_here(*looking, "strings were compared");
  }
  while (*a != 0 && *a == *b) ++a, ++b;
  return static_cast<unsigned char>(*a) - static_cast<unsigned char>(*b);
}

namespace std {
// Used by std::unordered_map and std::unordered_set with string keys.
size_t _Hash_bytes(const void* bytes, size_t size, size_t seed) {
  see("a string was hashed", &Seen::hashed);
  size_t hash = seed ^ 14695981039346656037ULL;
  for (size_t i = 0; i < size; ++i)
    hash = (hash ^ static_cast<const unsigned char*>(bytes)[i]) * 1099511628211ULL;
  return hash;
}
}  // namespace std

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names

/// Watches all threads until end() is called.
class Watching {
 public:
  Watching() {
    TITAN_CHECK(seen_.libtitan.end > 0 && seen_.libstdcxx.end > 0,
                "the libraries aren't loaded in this process");
    seen_.memory.reserve(4096);
    seen = &seen_;
  }
  ~Watching() { end(); }
  Watching(const Watching&) = delete;
  Watching& operator=(const Watching&) = delete;

  const Seen& end() {
    const std::lock_guard lock(seen_turns);
    seen = nullptr;
    return seen_;
  }
  std::string first() const {
    if (seen_.first == nullptr) return "";
    std::string text = str(seen_.first, " '", seen_.first_text, "':\n");
    char** const names = ::backtrace_symbols(seen_.first_stack.frames, seen_.first_stack.depth);
    for (int i = 0; i < seen_.first_stack.depth; ++i) text += str(names[i], "\n");
    std::free(names);
    return text;
  }

 private:
  Seen seen_;
  // While a profile is made, or virtual GPUs watch the host's reads, LibTorch asks for names.
  const at::DisableRecordFunctionGuard no_records_;
};

std::atomic<int64_t> num_host_reads{0};

/// Counts the numbers that any thread reads from tensors during its lifetime, because on a GPU a backward has
/// its own thread.
class HostReads {
 public:
  HostReads()
      : before_(num_host_reads),
        callback_(at::addGlobalCallback(at::RecordFunctionCallback(
            [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
              for (const char* name :
                   {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero"})
                if (std::strcmp(function.name(), name) == 0) ++num_host_reads;
              return nullptr;
            }))) {}
  ~HostReads() { at::removeCallback(callback_); }
  HostReads(const HostReads&) = delete;
  HostReads& operator=(const HostReads&) = delete;

  int64_t count() const { return num_host_reads - before_; }

 private:
  int64_t before_;
  at::CallbackHandle callback_;
};

/// With enough layers to show work that each of them does, and names too long to be stored in string objects.
LlamaCase small_llama() {
  return {.name = "small",
          .args = {{"dim", int64_t{64}},
                   {"n_layers", int64_t{3}},
                   {"n_heads", int64_t{4}},
                   {"n_kv_heads", int64_t{4}},
                   {"vocab_size", int64_t{64}},
                   {"multiple_of", int64_t{64}},
                   {"rope_theta", 10000.0}},
          .rows = 4,
          .seq_len = 16};
}

struct Way {
  const char* name;
  train::ParallelDims dims;
  TensorParallelOptions tensor = {};
  ContextParallelOptions context = {};
  std::optional<LayersPolicy> checkpointing = {};
  const char* recipe = nullptr;  ///< Float8 recipe; "delayed": tensorwise, with scales from previous steps
  bool scales_at_once = false;
};

std::vector<Way> ways(int ranks) {
  const train::ParallelDims shard{.dp_shard = ranks}, cp{.rows = {{"cp", ranks}}}, tp{.tp = ranks};
  return {
      {.name = "fsdp", .dims = shard},
      {.name = "ddp", .dims = {.dp_replicate = ranks}},
      {.name = "fsdp, checkpointed", .dims = shard, .checkpointing = FullRecompute{}},
      {.name = "tp", .dims = tp},
      {.name = "tp, no sequence parallel", .dims = tp, .tensor = {.sequence_parallel = false}},
      {.name = "tp, no loss parallel", .dims = tp, .tensor = {.loss_parallel = false}},
      {.name = "tp, overlapped", .dims = tp, .tensor = {.overlap = true}},
      {.name = "cp, ring by all-gather", .dims = cp},
      {.name = "cp, ring hop by hop",
       .dims = cp,
       .context = {.rotate_method = ContextRotateMethod::AllToAll}},
      {.name = "cp, keys gathered", .dims = cp, .context = {.attention = ContextAttention::AllGatherKv}},
      {.name = "fsdp, tensorwise", .dims = shard, .recipe = "tensorwise"},
      {.name = "fsdp, tensorwise, scales at once",
       .dims = shard,
       .recipe = "tensorwise",
       .scales_at_once = true},
      {.name = "fsdp, delayed", .dims = shard, .recipe = "delayed"},
      {.name = "tp, tensorwise", .dims = tp, .recipe = "tensorwise"},
      {.name = "tp, delayed", .dims = tp, .recipe = "delayed"},
      {.name = "tp, overlapped, tensorwise", .dims = tp, .tensor = {.overlap = true}, .recipe = "tensorwise"},
      {.name = "tp, rowwise", .dims = tp, .recipe = "rowwise"},
      {.name = "fsdp, rowwise_with_gw_hp", .dims = shard, .recipe = "rowwise_with_gw_hp"},
      {.name = "fsdp, mxfp8_cublas", .dims = shard, .recipe = "mxfp8_cublas"},
  };
}

void convert(train::TrainableModel& model, const std::string& recipe, bool scales_at_once = false) {
  const bool delayed = recipe == "delayed";
  float8::convert(*model.root().ptr(),
                  {.recipe_name = delayed ? "tensorwise" : recipe,
                   .filter_fqns = {"output"},
                   .arithmetic = arithmetic_of(recipe),
                   .plain = ops::default_products(),
                   .delayed = {.input = delayed, .weight = delayed, .grad_output = delayed},
                   .gather = {.in_float8 = recipe == "tensorwise", .scales_at_once = scales_at_once}});
}

void expect_nothing(Watching& watching, const std::string& what) {
  const Seen& seen = watching.end();
  EXPECT_EQ(seen.made + seen.compared + seen.hashed, 0) << what << ": " << watching.first();
}

/// Writes the weights as an optimizer does, so that data derived from them becomes stale.
void write_weights(const std::vector<Parameter>& list) {
  at::NoGradGuard no_grad;
  for (const Parameter& parameter : list) at::Tensor(parameter.data.local).mul_(1);
}

/// Calls the hook with a gradient of 3 in a backward: for a GPU, on one of autograd's threads.
void in_backward(const std::function<void(const at::Tensor& grad)>& hook) {
  const at::Tensor x = at::ones({1}, options_of(at::kFloat)).requires_grad_();
  const auto caller = std::this_thread::get_id();
  x.register_hook([&](const at::Tensor& grad) {
    EXPECT_EQ(std::this_thread::get_id() == caller, device().is_cpu());
    hook(grad);
  });
  (3 * x).backward();
}

/// On virtual GPUs, all ways and schedules take minutes.
bool is_short() { return device().is_cuda() && !all_cases(); }

/// Calls `call` for each way, with a step of its settled model.
void for_each_way(const std::function<void(const Way&, const std::function<void()>& step)>& call) {
  const LlamaCase llama = small_llama();
  const Batch batch = random_batch(llama, 1);
  const int64_t num_valid = batch.num_valid();
  int64_t number = 0;
  for (const Way& way : ways(world().size())) {
    if (is_short() && number++ % 9 != 0) continue;
    const train::Meshes meshes = train::build_meshes(world(), way.dims);
    const auto model = build_llama(llama, at::kFloat);
    if (way.recipe != nullptr) convert(*model, way.recipe, way.scales_at_once);
    FsdpOptions fsdp = fsdp_options(kFloat32);
    fsdp.mesh = meshes.fsdp;
    llama_spec().parallelize(*model, {.meshes = meshes,
                                      .fsdp = fsdp,
                                      .tensor = way.tensor,
                                      .parallelisms = {context_parallelism(way.context)},
                                      .activations = {way.checkpointing, {}}});
    materialize(model->root(), kSeed);
    auto scales = float8::DelayedScales::collect({model->root().ptr().get()}, 16, device());
    const Batch mine = batch.rows(meshes.dp_rank(), meshes.dp_degree());
    const at::Tensor tokens = mine.tokens.to(device()), labels = mine.labels.to(device());
    const std::vector<Parameter> list = parameters(model->root());
    const auto step = [&] {
      write_weights(list);
      set_last_micro_batch(model->root(), true);
      model->loss(tokens, labels, num_valid).backward();
      if (scales.empty()) return;
      scales.update([](const at::Tensor& pending) {
        world().everyone()->all_reduce(pending, dist::ReduceOp::Max, {"test::scales"}).wait();
      });
    };
    for (int i = 0; i < 3; ++i) step();
    call(way, step);
  }
}

TEST(HotPath, SettledModelBuildsAndLooksUpNoStrings) {
  for_each_way([](const Way& way, const std::function<void()>& step) {
    Watching watching;
    step();
    expect_nothing(watching, way.name);
  });
}

TEST(HotPath, SettledModelReadsNoNumbersFromTensors) {
  for_each_way([](const Way& way, const std::function<void()>& step) {
    const HostReads reads;
    step();
    // For a split vocabulary, tokens and labels are checked: on a device by an assertion, on a CPU
    // immediately.
    EXPECT_EQ(reads.count(), way.dims.tp > 1 && device().is_cpu() ? 2 : 0) << way.name;
  });
  const HostReads reads;
  EXPECT_EQ(at::ones({1}).item<double>(), 1);
  EXPECT_EQ(reads.count(), 1);
  in_backward([](const at::Tensor& grad) { EXPECT_EQ(grad.item<double>(), 3); });
  EXPECT_EQ(reads.count(), 2) << "in a hook of a backward";
}

TEST(HotPath, SettledPipelineBuildsNoStringsAndReadsNoNumbers) {
  LlamaCase llama = small_llama();
  llama.args["n_layers"] = int64_t{6};
  const Batch batch = random_batch(llama, 1);
  const int64_t num_valid = batch.num_valid();
  for (const char* schedule : {"1F1B", "Interleaved1F1B", "ZBVZeroBubble"}) {
    if (is_short() && schedule != std::string("ZBVZeroBubble")) continue;
    const int ranks = world().size();
    const Variant variant{.dims = {.pp = ranks},
                          .schedule = schedule,
                          .stages = schedule == std::string("1F1B") ? ranks : 2 * ranks,
                          .micro_batches = 4};
    const train::Meshes meshes = train::build_meshes(world(), variant.dims);
    Stages stages(llama, kFloat32, variant, meshes);
    train::PipelineRunner runner(stages.stages(), meshes.pp, device());
    const auto micro_batches = micro_batches_of(batch, variant.num_micro_batches());
    const train::StepPlan plan = runner.plan(
        stages.schedule(), boundaries_of(llama, kFloat32, variant, micro_batches.front().input_BS.size(0)));
    const auto step = [&] {
      write_weights(stages.parameters());
      runner.run(plan, micro_batches, num_valid);
    };
    for (int i = 0; i < 3; ++i) step();
    {
      Watching watching;
      step();
      expect_nothing(watching, schedule);
    }
    const HostReads reads;
    step();
    EXPECT_EQ(reads.count(), 0) << schedule;
  }
}

// The tests above can detect every kind of use.
TEST(HotPath, DetectsStrings) {
  const auto model = build_llama(small_llama(), at::kFloat);
  {
    Watching watching;
    EXPECT_FALSE(parameters(model->root()).empty());  // has names
    EXPECT_GT(watching.end().made, 0);
  }
  {
    Watching watching;
    in_backward([&](const at::Tensor&) { EXPECT_FALSE(parameters(model->root()).empty()); });
    EXPECT_GT(watching.end().made, 0) << "in a hook of a backward";
  }
  {
    Watching watching;
    convert(*model, "tensorwise");  // but only the named ones
    EXPECT_GT(watching.end().compared, 0);
  }
  {
    const std::map<std::string, std::string> variables = {{"OMPI_COMM_WORLD_RANK", "0"},
                                                          {"OMPI_COMM_WORLD_SIZE", "2"},
                                                          {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                                          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                                          {"PMIX_NAMESPACE", "prterun-of-this-test"}};
    Watching watching;
    dist::read_launch([&](const char* name) {
      const auto found = variables.find(name);
      return found == variables.end() ? std::nullopt : std::optional(found->second);
    });  // a job's port is derived from its name
    EXPECT_GT(watching.end().hashed, 0);
  }
}

}  // namespace
}  // namespace titan
