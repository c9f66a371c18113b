#include "simt/simt.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/stream.h"
#include "simt/accesses.h"

// Saves the caller's stack pointer, with the registers that a function keeps for its caller on the stack, and continues where `to` was
// saved. (swapcontext makes a system call each time, and kernels change threads millions of times.)
extern "C" void virtual_gpu_switch(void** save, void* to);
#ifndef __x86_64__
#error "virtual GPUs run on x86-64: LibTorch's wheels with CUDA for other processors have not been tried"
#endif
asm(R"(
  .pushsection .text
  .globl virtual_gpu_switch
  .type virtual_gpu_switch, @function
virtual_gpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size virtual_gpu_switch, . - virtual_gpu_switch
  .popsection
)");

namespace virtual_gpu::simt {

Place place;

namespace {

constexpr size_t stack_bytes = 64 << 10, guard_bytes = 4096;

// Below it, a page that nothing can access. Never freed, because fibers aren't.
char* make_stack() {
  void* const memory =
      mmap(nullptr, guard_bytes + stack_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* const stack = static_cast<char*>(memory) + guard_bytes;
  if (memory == MAP_FAILED || mprotect(stack, stack_bytes, PROT_READ | PROT_WRITE) != 0)
    not_supported("a kernel whose threads' stacks find no memory", "The host's memory is full.");
  return stack;
}

std::string text_of(const Site& site) {
  return std::string(site.file_name()) + ":" + std::to_string(site.line());
}
bool is_same(const Site& a, const Site& b) {
  return a.line() == b.line() &&
         (a.file_name() == b.file_name() || std::string_view(a.file_name()) == b.file_name());
}

enum class State { can_run, at_block_barrier, at_warp_barrier, has_returned };

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = make_stack();
  State state = State::can_run;
  uint3 thread;
  bool is_in_kernel = false;
  Site site;           ///< where it waits
  unsigned mask = 0;   ///< lanes of the warp operation that it waits in
  unsigned lanes = 0;  ///< those that were in the last one

  bool is_with(const Fiber& other) const {
    return state == other.state && mask == other.mask && is_same(site, other.site);
  }
};

struct Warp {
  std::array<uint64_t, warp_size> arriving{};
  std::array<uint64_t, warp_size> values{};  ///< from each lane's last exchange
};

/// The block that runs now. Kernels run on the scheduler's thread, one at a time.
class Block {
 public:
  void run(dim3 size, const std::function<void()>& kernel) {
    kernel_ = &kernel;
    begin_block();
    prepare(size);
    while (true) {
      if (run_warps()) continue;
      if (release_warps() || release_block()) continue;
      break;
    }
    report_waiting();
  }

  void wait(State state, const Site& site = {}, unsigned mask = 0) {
    Fiber& fiber = *current_;
    fiber.state = state;
    fiber.site = site;
    fiber.mask = mask;
    virtual_gpu_switch(&fiber.stack_pointer, scheduler_);
  }
  Warp& warp() { return warps_[index_ / warp_size]; }
  size_t lane() const { return index_ % warp_size; }
  unsigned lanes() const { return current_->lanes; }
  void enter_kernel() {
    current_->is_in_kernel = true;
    watch_current();
  }

 private:
  std::span<std::unique_ptr<Fiber>> used() { return {fibers_.data(), num_threads_}; }

  void prepare(dim3 size) {
    num_threads_ = size_t{size.x} * size.y * size.z;
    while (fibers_.size() < num_threads_) fibers_.push_back(std::make_unique<Fiber>());
    warps_.assign((num_threads_ + warp_size - 1) / warp_size, {});
    for (size_t i = 0; i < num_threads_; ++i) {
      Fiber& fiber = *fibers_[i];
      fiber.state = State::can_run;
      fiber.is_in_kernel = false;
      const auto n = static_cast<unsigned>(i);
      fiber.thread = {n % size.x, n / size.x % size.y, n / size.x / size.y};
      // virtual_gpu_switch takes six registers and the place to continue from the stack. A function begins 8 bytes below a multiple of 16.
      auto* top =
          reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(fiber.stack + stack_bytes) & ~uintptr_t{15});
      *--top = nullptr;
      *--top = reinterpret_cast<void*>(&Block::enter);
      for (int i = 0; i < 6; ++i) *--top = nullptr;
      fiber.stack_pointer = top;
    }
  }

  [[noreturn]] static void enter();

  // Names the places where threads wait forever, with the first thread of each.
  void report_waiting() {
    std::vector<const Fiber*> firsts;
    std::string places;
    for (const auto& fiber : used()) {
      if (fiber->state == State::has_returned ||
          std::ranges::any_of(firsts, [&](const Fiber* first) { return fiber->is_with(*first); }))
        continue;
      firsts.push_back(fiber.get());
      places += (places.empty() ? "Thread " : ", thread ") + std::to_string(fiber->thread.x) + " at " +
                text_of(fiber->site);
    }
    if (!firsts.empty())
      not_supported("a kernel whose threads wait for others that never come", places + ".");
  }

  // Runs each thread that can run until it waits or returns; warps in random order, because hardware promises none.
  bool run_warps() {
    std::vector<size_t> order(warps_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::ranges::shuffle(order, random_);
    bool any_ran = false;
    for (const size_t warp : order) {
      for (size_t i = warp * warp_size; i < std::min(num_threads_, (warp + 1) * warp_size); ++i) {
        if (fibers_[i]->state != State::can_run) continue;
        any_ran = true;
        index_ = i;
        current_ = fibers_[i].get();
        place.thread = current_->thread;
        if (current_->is_in_kernel) watch_current();
        virtual_gpu_switch(&scheduler_, current_->stack_pointer);
        stop_watching();
      }
    }
    return any_ran;
  }

  // A warp operation is complete when all lanes of its mask that haven't returned wait in it.
  bool release_warps() {
    bool any = false;
    for (size_t w = 0; w < warps_.size(); ++w) {
      const std::span lanes =
          used().subspan(w * warp_size).first(std::min<size_t>(warp_size, num_threads_ - w * warp_size));
      for (const auto& first : lanes) {
        if (first->state != State::at_warp_barrier) continue;
        unsigned together = 0, missing = 0;
        for (size_t i = 0; i < lanes.size(); ++i) {
          if (!(first->mask >> i & 1) || lanes[i]->state == State::has_returned) continue;
          (lanes[i]->is_with(*first) ? together : missing) |= 1u << i;
        }
        if (missing != 0 || together == 0) continue;
        any = true;
        for (size_t i = 0; i < lanes.size(); ++i) {
          if (!(together >> i & 1)) continue;
          warps_[w].values[i] = warps_[w].arriving[i];
          lanes[i]->lanes = together;
          lanes[i]->state = State::can_run;
        }
      }
    }
    return any;
  }

  // The threads that haven't returned must all wait at the same barrier.
  bool release_block() {
    const Fiber* first = nullptr;
    for (const auto& fiber : used()) {
      if (fiber->state == State::has_returned) continue;
      if (!first) first = fiber.get();
      if (fiber->state != State::at_block_barrier || !fiber->is_with(*first)) return false;
    }
    if (!first) return false;
    for (const auto& fiber : used())
      if (fiber->state == State::at_block_barrier) fiber->state = State::can_run;
    pass_barrier();
    return true;
  }

  void watch_current() { watch(static_cast<uint32_t>(index_), current_->stack, stack_bytes); }

  const std::function<void()>* kernel_ = nullptr;
  size_t num_threads_ = 0;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Warp> warps_;
  void* scheduler_ = nullptr;
  Fiber* current_ = nullptr;
  size_t index_ = 0;
  std::mt19937 random_{static_cast<uint32_t>(virtual_gpu::state().settings.seed)};
};

Block& block() {
  static auto* b = new Block;
  return *b;
}

void Block::enter() {
  Block& self = block();
  (*self.kernel_)();
  self.wait(State::has_returned);
  __builtin_unreachable();
}

std::atomic<bool> runs_in_memory_only_mode = false;

}  // namespace

void enter_kernel() { block().enter_kernel(); }
void wait_for_block(const Site& site) { block().wait(State::at_block_barrier, site); }

Exchanged exchange(unsigned mask, uint64_t value, const Site& site) {
  Block& b = block();
  b.warp().arriving[b.lane()] = value;
  b.wait(State::at_warp_barrier, site, mask);
  Exchanged all{b.warp().values, b.lanes()};
  if (all.lanes != ~0u)
    for (size_t i = 0; i < all.values.size(); ++i)
      if (!(all.lanes >> i & 1)) all.values[i] = 0;
  return all;
}

uint64_t Exchanged::of(unsigned lane) const {
  if (!(lanes >> lane & 1))
    not_supported("a kernel that reads lane " + std::to_string(lane) + " of a warp operation without it",
                  "Its value is undefined.");
  return values[lane];
}

void launch(Kernel kernel, cudaStream_t stream) {
  if (check_launch(kernel.grid, kernel.block)) return;
  const std::string_view text = kernel.name;
  const std::string name(text.substr(0, text.find_first_of("<,")));
  const void* const code = kernel.code;
  Operation operation = computation(name, {}, [name, kernel = std::move(kernel)] {
    if (!computes() && !runs_in_memory_only_mode) return;
    begin_kernel(name.c_str());
    place.block_size = kernel.block;
    place.grid_size = kernel.grid;
    for (unsigned z = 0; z < kernel.grid.z; ++z)
      for (unsigned y = 0; y < kernel.grid.y; ++y)
        for (unsigned x = 0; x < kernel.grid.x; ++x) {
          place.block = {x, y, z};
          block().run(kernel.block, kernel.run);
        }
    add_accesses(end_kernel());
  });
  operation.code = code;
  submit(stream, std::move(operation));
}

}  // namespace virtual_gpu::simt

/// For tests: whether LibTitan's kernels run in memory-only mode, too, so that their bytes are counted.
extern "C" void virtual_gpu_run_kernels(bool run) { virtual_gpu::simt::runs_in_memory_only_mode = run; }
