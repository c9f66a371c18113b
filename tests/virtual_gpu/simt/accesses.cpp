#include "simt/accesses.h"

#include <dlfcn.h>
#include <elf.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/faults.h"
#include "runtime/races.h"
#include "simt/simt.h"

// The linker's names for the library's image.
extern "C" {
[[gnu::visibility("hidden")]] extern char __ehdr_start, _end;
}

namespace virtual_gpu::simt {
namespace {

// The last access of a byte: the number of the stretch between two barriers, and the thread. 0: nobody.
using Visit = uint32_t;
constexpr int thread_bits = 11;
constexpr uint32_t several_threads = (1u << thread_bits) - 2, atomically = several_threads + 1;
uint32_t stretch_of(Visit v) { return v >> thread_bits; }
uint32_t thread_of(Visit v) { return v & ((1u << thread_bits) - 1); }

struct Byte {
  Visit writer = 0, reader = 0;
};

enum class Kind { read, write, atomic };

uintptr_t number_of(const void* address) { return reinterpret_cast<uintptr_t>(address); }

struct Memory {
  uintptr_t begin = 0, end = 0;
  bool contains(uintptr_t at, size_t bytes) const { return at >= begin && at + bytes <= end; }
};

// A variable of the library that can be written. Shared ones are static variables of functions.
struct Variable {
  std::string symbol;
  Memory memory;
  bool is_shared = false;
  bool is_in_use = false;     // by the block that runs now
  std::vector<Byte> bytes{};  // empty unless it is shared
};

// By address. They come from the symbols of the library's file, because GCC ignores sections for static variables of templates.
std::vector<Variable> read_variables() {
  Dl_info library;
  if (!dladdr(&__ehdr_start, &library)) return {};
  std::ifstream file(library.dli_fname, std::ios::binary);
  const std::string image(std::istreambuf_iterator<char>(file), {});
  const auto at = [&]<class T>(const T*, size_t offset) {
    return reinterpret_cast<const T*>(&image[offset]);
  };
  const auto* header = at(static_cast<const Elf64_Ehdr*>(nullptr), 0);
  const std::span sections(at(static_cast<const Elf64_Shdr*>(nullptr), header->e_shoff), header->e_shnum);
  std::vector<Variable> variables;
  for (const Elf64_Shdr& table : sections) {
    if (table.sh_type != SHT_SYMTAB) continue;
    const std::span symbols(at(static_cast<const Elf64_Sym*>(nullptr), table.sh_offset),
                            table.sh_size / sizeof(Elf64_Sym));
    for (const Elf64_Sym& symbol : symbols) {
      if (ELF64_ST_TYPE(symbol.st_info) != STT_OBJECT || symbol.st_shndx >= sections.size() ||
          !(sections[symbol.st_shndx].sh_flags & SHF_WRITE) || symbol.st_size == 0)
        continue;
      const std::string name = &image[sections[table.sh_link].sh_offset + symbol.st_name];
      const uintptr_t begin = number_of(&__ehdr_start) + symbol.st_value;
      variables.push_back({.symbol = name,
                           .memory = {begin, begin + symbol.st_size},
                           .is_shared = name.starts_with("_ZZ") && !name.starts_with("_ZZN11virtual_gpu")});
    }
  }
  if (variables.empty())
    not_supported(std::string(library.dli_fname) + " without symbols", "Don't strip it.");
  std::ranges::sort(variables, {}, [](const Variable& v) { return v.memory.begin; });
  return variables;
}

constexpr int page_bits = 12;
struct Page {
  std::array<Byte, 1 << page_bits> bytes;
  std::bitset<1 << page_bits> is_read_before_write;  // by this kernel, which does both

  // Whether the kernel has read what it found in the byte.
  bool is_read_first(size_t i) const {
    return bytes[i].reader != 0 && (bytes[i].writer == 0 || is_read_before_write[i]);
  }
  Memory allocation;  // the last one that was accessed in this page
};

// The thread of the block that runs now. Other threads of the process call the functions below when they launch a kernel.
struct Watched {
  uint32_t thread = 0;
  Memory stack;
};
[[gnu::tls_model("initial-exec")]] thread_local Watched watched;

class Accesses {
 public:
  void begin(const char* name) {
    name_ = name;
    stretch_ = first_stretch_ = 0;
    has_race_ = false;
  }
  void begin_block() {
    pass_barrier();
    first_stretch_ = stretch_;
    for (Variable* variable : std::exchange(in_use_, {})) variable->is_in_use = false;
  }
  void pass_barrier() {
    if (++stretch_ >> (32 - thread_bits))
      not_supported(std::string("a kernel with millions of barriers, ") + name_, "Make its grid smaller.");
  }

  void access(uintptr_t at, size_t bytes, Kind kind) {
    if (at >= number_of(&__ehdr_start) && at < number_of(&_end)) {
      access_to_library(at, bytes, kind);
    } else {
      accessed_.bytes_requested += bytes;
      for (size_t done = 0; done < bytes;) {  // it may go over the end of a page
        const size_t in_page = (at + done) % (1 << page_bits);
        const size_t part = std::min(bytes - done, (1 << page_bits) - in_page);
        Page& page = page_of(at + done);
        if (!page.allocation.contains(at, bytes)) {
          const Range found = find_allocation(reinterpret_cast<const void*>(at));
          page.allocation = {number_of(found.data), number_of(found.data) + found.bytes};
          if (!page.allocation.contains(at, bytes)) end(kind, at, bytes, "outside any allocation");
        }
        if (kind != Kind::read)
          for (size_t i = in_page; i < in_page + part; ++i)
            if (page.bytes[i].writer == 0 && (kind == Kind::atomic || page.bytes[i].reader != 0))
              page.is_read_before_write.set(i);
        visit(std::span(page.bytes).subspan(in_page, part), at, kind);
        done += part;
      }
    }
  }

  Accessed finish() {
    std::vector<uintptr_t> numbers;
    for (const auto& [number, page] : pages_) numbers.push_back(number);
    std::ranges::sort(numbers);
    std::vector<Range>& ranges = accessed_.ranges;
    for (const bool is_written : {false, true}) {
      Range open;
      for (const uintptr_t number : numbers) {
        const Page& page = *pages_[number];
        const Visit Byte::*visit = is_written ? &Byte::writer : &Byte::reader;
        for (size_t i = 0; i < page.bytes.size();) {
          const size_t begin = i;
          const bool is_accessed = page.bytes[i].*visit != 0;
          const bool is_read_first = !is_written && page.is_read_first(i);
          while (++i < page.bytes.size() && (page.bytes[i].*visit != 0) == is_accessed &&
                 (is_written || page.is_read_first(i) == is_read_first)) {
          }
          if (!is_accessed) continue;
          const uintptr_t at = (number << page_bits) + begin;
          if (open.bytes > 0 && at == number_of(open.data) + open.bytes &&
              open.is_computed_with == is_read_first) {
            open.bytes += i - begin;
            continue;
          }
          if (open.bytes > 0) ranges.push_back(open);
          open = {.data = reinterpret_cast<const void*>(at),
                  .bytes = i - begin,
                  .is_written = is_written,
                  .is_computed_with = is_read_first};
        }
      }
      if (open.bytes > 0) ranges.push_back(open);
    }
    for (auto& [number, page] : pages_) unused_.push_back(std::move(page));
    pages_.clear();
    recent_ = {};
    return std::exchange(accessed_, {});
  }

 private:
  struct Recent {
    uintptr_t number = 0;
    Page* page = nullptr;
  };

  // Kernels may change the shared ones of the library's own variables, and read the others.
  void access_to_library(uintptr_t at, size_t bytes, Kind kind) {
    if (!last_ || !last_->memory.contains(at, bytes)) {
      const auto after =
          std::ranges::upper_bound(variables_, at, {}, [](const Variable& v) { return v.memory.begin; });
      Variable* const found = after == variables_.begin() ? nullptr : &*std::prev(after);
      if (!found || at >= found->memory.end) {
        if (kind == Kind::read && !found) return;  // a constant, which the linker puts before variables
        end(kind, at, bytes, "outside any variable");
      }
      if (at + bytes > found->memory.end) end(kind, at, bytes, "over the end of a variable");
      if (!found->is_shared) {
        if (kind != Kind::read) end(kind, at, bytes, "in a variable that isn't shared memory");
        return;
      }
      last_ = found;
    }
    // A block finds NaN in shared memory.
    if (!std::exchange(last_->is_in_use, true)) {
      // The symbol has the function's name: a kernel's, or that of a function that several may call.
      if (last_->symbol.find("_kernel") != std::string::npos &&
          last_->symbol.find(name_) == std::string::npos)
        end(kind, at, bytes, "in shared memory of another kernel");
      std::memset(reinterpret_cast<void*>(last_->memory.begin), 0xff,
                  last_->memory.end - last_->memory.begin);
      last_->bytes.assign(last_->memory.end - last_->memory.begin, {});
      in_use_.push_back(last_);
    }
    const std::span touched = std::span(last_->bytes).subspan(at - last_->memory.begin, bytes);
    if (kind != Kind::write && std::ranges::any_of(touched, [](const Byte& b) { return b.writer == 0; }))
      end(kind, at, bytes, "in shared memory, which nothing has written");
    visit(touched, at, kind);
  }

  Page& page_of(uintptr_t at) {
    const uintptr_t number = at >> page_bits;
    Recent& recent = recent_[number % recent_.size()];
    if (recent.number != number) {
      std::unique_ptr<Page>& page = pages_[number];
      if (!page) page = take_page();
      recent = {number, page.get()};
    }
    return *recent.page;
  }
  std::unique_ptr<Page> take_page() {
    if (unused_.empty()) return std::make_unique<Page>();
    std::unique_ptr<Page> page = std::move(unused_.back());
    unused_.pop_back();
    *page = {};
    return page;
  }

  bool is_of_earlier_block(Visit v) const { return v != 0 && stretch_of(v) < first_stretch_; }
  // Barriers order threads of one block only.
  bool conflicts(Visit before, uint32_t thread) const {
    if (before == 0 || (thread_of(before) == atomically && thread == atomically)) return false;
    return is_of_earlier_block(before) || (stretch_of(before) == stretch_ && thread_of(before) != thread);
  }

  // The bytes of an element have mostly been accessed together.
  void visit(std::span<Byte> bytes, uintptr_t at, Kind kind) {
    const bool alike =
        std::memcmp(&bytes.front(), &bytes.front() + 1, (bytes.size() - 1) * sizeof(Byte)) == 0;
    if (!alike) {
      for (Byte& b : bytes) visit(b, at, bytes.size(), kind);
      return;
    }
    visit(bytes.front(), at, bytes.size(), kind);
    std::ranges::fill(bytes.subspan(1), bytes.front());
  }
  void visit(Byte& b, uintptr_t at, size_t num_bytes, Kind kind) {
    const uint32_t thread = kind == Kind::atomic ? atomically : watched.thread;
    const Visit now = stretch_ << thread_bits | thread;
    if (conflicts(b.writer, thread) || (kind != Kind::read && conflicts(b.reader, thread)))
      report(kind, at, num_bytes, conflicts(b.writer, thread));
    // If several don't conflict with each other, the one stays that conflicts with more of the following accesses.
    if (kind != Kind::write && !is_of_earlier_block(b.reader)) {
      const bool is_second = stretch_of(b.reader) == stretch_ && thread_of(b.reader) != thread;
      b.reader = is_second ? stretch_ << thread_bits | several_threads : now;
    }
    if (kind == Kind::write || (kind == Kind::atomic && !is_of_earlier_block(b.writer))) b.writer = now;
  }

  void print(const char* problem, Kind kind, uintptr_t at, size_t bytes) const {
    const uint3 t = place.thread, b = place.block;
    const char* verb = kind == Kind::read ? "reads" : kind == Kind::write ? "writes" : "changes";
    report_fault("virtual GPU: %s%s: thread (%u, %u, %u) of block (%u, %u, %u) %s %zu bytes at %#zx", problem,
                 name_, t.x, t.y, t.z, b.x, b.y, b.z, verb, bytes, size_t{at});
  }
  [[noreturn]] void end(Kind kind, uintptr_t at, size_t bytes, const char* where) const {
    print("", kind, at, bytes);
    end_program(", %s\n", where);
  }
  void report(Kind kind, uintptr_t at, size_t bytes, bool was_written) {
    if (std::exchange(has_race_, true)) return;  // one report is enough
    print("RACE in ", kind, at, bytes);
    report_fault(", which another thread %s, and no barrier is between\n", was_written ? "wrote" : "read");
    const Lock lock(state().mutex);
    count_race();
  }

  const char* name_ = "";
  uint32_t stretch_ = 0, first_stretch_ = 0;  // first_stretch_ is the block's
  bool has_race_ = false;
  std::vector<Variable> variables_ = read_variables();
  std::vector<Variable*> in_use_;
  Variable* last_ = nullptr;  // the shared variable that was accessed last
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  std::array<Recent, 64> recent_;
  std::vector<std::unique_ptr<Page>> unused_;
  Accessed accessed_;
};

Accesses& accesses() {
  static auto* a = new Accesses;
  return *a;
}

void access(const void* address, size_t bytes, Kind kind) {
  const Memory& stack = watched.stack;
  if (bytes == 0 || stack.end == 0 || stack.contains(number_of(address), bytes)) return;
  accesses().access(number_of(address), bytes, kind);
}

}  // namespace

void begin_kernel(const char* name) { accesses().begin(name); }
void begin_block() { accesses().begin_block(); }
void pass_barrier() { accesses().pass_barrier(); }
void watch(uint32_t thread, const char* stack, size_t stack_bytes) {
  watched = {thread, {number_of(stack), number_of(stack) + stack_bytes}};
}
void stop_watching() { watched = {}; }
void change(const void* address, size_t bytes) { access(address, bytes, Kind::atomic); }
Accessed end_kernel() { return accesses().finish(); }

}  // namespace virtual_gpu::simt

// ---- what -fsanitize=thread calls

#define ACCESS(name, bytes, kind)                                             \
  void __tsan_##name(void* address) {                                         \
    virtual_gpu::simt::access(address, bytes, virtual_gpu::simt::Kind::kind); \
  }
#define ACCESSES(bytes)                      \
  ACCESS(read##bytes, bytes, read)           \
  ACCESS(write##bytes, bytes, write)         \
  ACCESS(unaligned_read##bytes, bytes, read) \
  ACCESS(unaligned_write##bytes, bytes, write)

extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* address, size_t bytes) {
  virtual_gpu::simt::access(address, bytes, virtual_gpu::simt::Kind::read);
}
void __tsan_write_range(void* address, size_t bytes) {
  virtual_gpu::simt::access(address, bytes, virtual_gpu::simt::Kind::write);
}
void __tsan_init() {}

// The names that simt.h gives to the C library's functions.
void* virtual_gpu_memcpy(void* to, const void* from, size_t bytes) {
  __tsan_read_range(const_cast<void*>(from), bytes);
  __tsan_write_range(to, bytes);
  return std::memcpy(to, from, bytes);
}
void* virtual_gpu_memmove(void* to, const void* from, size_t bytes) {
  __tsan_read_range(const_cast<void*>(from), bytes);
  __tsan_write_range(to, bytes);
  return std::memmove(to, from, bytes);
}
void* virtual_gpu_memset(void* to, int value, size_t bytes) {
  __tsan_write_range(to, bytes);
  return std::memset(to, value, bytes);
}
}
