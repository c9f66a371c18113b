#include "simt/simt.h"

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

constexpr size_t stack_bytes = 64 << 10;

enum class State { can_run, at_block_barrier, at_warp_barrier, has_returned };

struct Fiber {
  void* stack_pointer = nullptr;
  std::unique_ptr<char[]> stack{new char[stack_bytes]};
  State state = State::can_run;
  uint3 thread;
  bool is_in_kernel = false;
  unsigned mask = 0;  ///< lanes of the warp operation that it waits in
};

struct Warp {
  std::array<uint64_t, warp_size> arriving{};
  std::array<uint64_t, warp_size> values{};  ///< from the last exchange
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
    for (const auto& fiber : used())
      if (fiber->state != State::has_returned)
        not_supported("a kernel whose threads wait for others that never come", "Its barriers don't match.");
  }

  void wait(State state) {
    Fiber& fiber = *current_;
    fiber.state = state;
    virtual_gpu_switch(&fiber.stack_pointer, scheduler_);
  }
  Warp& warp() { return warps_[index_ / warp_size]; }
  size_t lane() const { return index_ % warp_size; }
  void set_mask(unsigned mask) { current_->mask = mask; }
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
      auto* top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(fiber.stack.get() + stack_bytes) &
                                           ~uintptr_t{15});
      *--top = nullptr;
      *--top = reinterpret_cast<void*>(&Block::enter);
      for (int i = 0; i < 6; ++i) *--top = nullptr;
      fiber.stack_pointer = top;
    }
  }

  [[noreturn]] static void enter();

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

  // A warp operation is complete when no lane of its mask can still come.
  bool release_warps() {
    bool any = false;
    for (size_t w = 0; w < warps_.size(); ++w) {
      const size_t begin = w * warp_size, end = std::min(num_threads_, begin + warp_size);
      unsigned here = 0, returned = 0, mask = 0;
      for (size_t i = begin; i < end; ++i) {
        const unsigned bit = 1u << (i - begin);
        if (fibers_[i]->state == State::at_warp_barrier) {
          here |= bit;
          mask = fibers_[i]->mask;
        }
        if (fibers_[i]->state == State::has_returned) returned |= bit;
      }
      if (end - begin < warp_size) returned |= ~((1u << (end - begin)) - 1);
      if (here == 0 || (mask & ~(here | returned)) != 0) continue;
      any = true;
      warps_[w].values = std::exchange(warps_[w].arriving, {});
      for (size_t i = begin; i < end; ++i)
        if (here & 1u << (i - begin)) fibers_[i]->state = State::can_run;
    }
    return any;
  }

  bool release_block() {
    bool any = false;
    for (const auto& fiber : used())
      if (fiber->state == State::at_warp_barrier) return false;
    for (const auto& fiber : used()) {
      if (fiber->state != State::at_block_barrier) continue;
      fiber->state = State::can_run;
      any = true;
    }
    if (any) pass_barrier();
    return any;
  }

  void watch_current() { watch(static_cast<uint32_t>(index_), current_->stack.get(), stack_bytes); }

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
void wait_for_block() { block().wait(State::at_block_barrier); }

std::array<uint64_t, warp_size> exchange(unsigned mask, uint64_t value) {
  Block& b = block();
  b.set_mask(mask);
  b.warp().arriving[b.lane()] = value;
  b.wait(State::at_warp_barrier);
  return b.warp().values;
}

void launch(Kernel kernel, cudaStream_t stream) {
  const std::string_view text = kernel.name;
  const std::string name(text.substr(0, text.find_first_of("<,")));
  submit(stream, computation(name, {}, [name, kernel = std::move(kernel)] {
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
           add_ranges(end_kernel());
         }));
}

}  // namespace virtual_gpu::simt

/// For tests: whether LibTitan's kernels run in memory-only mode, too, so that their bytes are counted.
extern "C" void virtual_gpu_run_kernels(bool run) { virtual_gpu::simt::runs_in_memory_only_mode = run; }
