#include "checkpoint/save/staging.h"

#include <sys/mman.h>
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "core/threads.h"
#include "dist/stream.h"
#include "titan/core/error.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace titan::checkpoint::detail {

#ifdef __SSE2__

void streaming_copy(void* to, const void* from, size_t num_bytes) {
  constexpr size_t line = 64, word = sizeof(__m128i);
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  const size_t head = std::min(num_bytes, (line - reinterpret_cast<uintptr_t>(target) % line) % line);
  std::memcpy(target, source, head);
  size_t done = head;
  for (; done + line <= num_bytes; done += line) {
    for (size_t i = 0; i < line; i += word) {
      const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + done + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + done + i), value);
    }
  }
  _mm_sfence();
  std::memcpy(target + done, source + done, num_bytes - done);
}

#else

void streaming_copy(void* to, const void* from, size_t num_bytes) { std::memcpy(to, from, num_bytes); }

#endif

namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kHugePageBytes = int64_t{2} << 20;
// Large enough to be worth a thread's time.
constexpr int64_t kCopyBytes = int64_t{16} << 20;

int64_t rounded_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

bool is_direct(const PlannedPiece& piece, const at::Tensor& local) {
  return piece.is_whole_rows && local.is_cpu() && local.is_contiguous();
}

const char* first_byte(const PlannedPiece& piece, const at::Tensor& local) {
  const auto* bytes = static_cast<const char*>(local.const_data_ptr());
  if (piece.start.empty()) return bytes;
  return bytes + piece.start[0] * local.stride(0) * static_cast<int64_t>(local.itemsize());
}

at::Tensor tensor_at(char* memory, const PlannedPiece& piece, at::ScalarType dtype) {
  return at::from_blob(memory, piece.box.length, at::TensorOptions().dtype(dtype));
}

}  // namespace

StagingBuffer::~StagingBuffer() { release(); }

void StagingBuffer::release() {
  if (data_ && !locked_.defined()) ::munmap(data_, static_cast<size_t>(num_bytes_));
  locked_.reset();
  data_ = nullptr;
  num_bytes_ = 0;
}

void StagingBuffer::reserve(int64_t num_bytes, bool page_locked) {
  if (num_bytes <= num_bytes_) return;
  release();
  num_bytes = rounded_up(num_bytes, kHugePageBytes);
  if (page_locked) {
    locked_ = at::empty({num_bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    data_ = static_cast<char*>(locked_.mutable_data_ptr());
  } else {
    void* memory = ::mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TITAN_CHECK(memory != MAP_FAILED, "no host memory for the copy of a checkpoint: ", num_bytes,
                " bytes: ", std::strerror(errno));
    // Fewer page faults at the first copy; where the kernel refuses, it is only slower.
    ::madvise(memory, static_cast<size_t>(num_bytes), MADV_HUGEPAGE);
    data_ = static_cast<char*>(memory);
  }
  num_bytes_ = num_bytes;
}

Staging::Staging(const SavePlan& plan, const std::vector<NamedTensor>& tensors, StagingBuffer& buffer,
                 bool in_place) {
  at::NoGradGuard no_grad;
  int64_t needed = 0;
  bool from_device = false;
  std::vector<int64_t> offsets;  // -1: written in place
  for (const PlannedPiece& piece : plan.pieces()) {
    const at::Tensor& local = tensors[piece.source].data.local;
    offsets.push_back(in_place && is_direct(piece, local) ? -1 : needed);
    if (offsets.back() >= 0) needed += rounded_up(piece.num_bytes, kAlignment);
    from_device = from_device || !local.is_cpu();
  }
  buffer.reserve(needed, from_device);
  for (size_t i = 0; i < offsets.size(); ++i) {
    const PlannedPiece& piece = plan.pieces()[i];
    const at::Tensor& local = tensors[piece.source].data.local;
    alive_.push_back(local);
    if (offsets[i] < 0) {
      pieces_.push_back({piece.name, piece.box, part_of(local, piece)});
      continue;
    }
    at::Tensor target = tensor_at(buffer.data() + offsets[i], piece, local.scalar_type());
    add(piece, local, target);
    pieces_.push_back({piece.name, piece.box, std::move(target)});
  }
}

void Staging::add(const PlannedPiece& piece, const at::Tensor& local, const at::Tensor& target) {
  if (!is_direct(piece, local)) {
    auto& list = local.is_cpu() ? tensors_ : device_;
    list.push_back({part_of(local, piece), target});
    return;
  }
  const char* from = first_byte(piece, local);
  auto* to = static_cast<char*>(target.mutable_data_ptr());
  for (int64_t done = 0; done < piece.num_bytes; done += kCopyBytes)
    bytes_.push_back({from + done, to + done, std::min(kCopyBytes, piece.num_bytes - done)});
}

void Staging::launch_from_device() {
  if (device_.empty()) return;
  at::NoGradGuard no_grad;
  const at::Device device = device_.front().from.device();
  const dist::Stream side = dist::Stream::create(device);
  dist::name_stream("checkpoint copies", side);
  side.wait(dist::Stream::current(device));
  dist::StreamGuard guard(side);
  for (const TensorCopy& copy : device_) {
    copy.to.copy_(copy.from, /*non_blocking=*/true);
    side.keep_alive(copy.from);
  }
  copied_ = side.record();
}

void Staging::copy_from_host(int num_threads) const {
  run_tasks(num_threads, bytes_.size() + tensors_.size(), [this](size_t index) {
    if (index < bytes_.size()) {
      const BytesCopy& copy = bytes_[index];
      streaming_copy(copy.to, copy.from, static_cast<size_t>(copy.num_bytes));
      return;
    }
    at::NoGradGuard no_grad;
    const TensorCopy& copy = tensors_[index - bytes_.size()];
    copy.to.copy_(copy.from);
  });
}

void Staging::order_current_stream() const {
  if (!device_.empty()) dist::Stream::current(device_.front().from.device()).wait(copied_);
}

}  // namespace titan::checkpoint::detail
