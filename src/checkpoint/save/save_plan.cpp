#include "checkpoint/save/save_plan.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <map>
#include <memory>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include "checkpoint/save/rank_tree.h"
#include "core/process.h"
#include "core/threads.h"
#include "dist/device_backend.h"
#include "tensor/memory.h"
#include "titan/core/error.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace titan::checkpoint::detail {
namespace {

constexpr dist::Label kPlanLabel{.phase = "checkpoint::plan"};

void axis_fields(auto& wire, auto& axis) { wire(axis.name, axis.size, axis.stride, axis.dim, axis.only); }

std::vector<StateTensor> own_tensors(const std::vector<NamedTensor>& tensors, const DeviceMesh& pipeline) {
  std::vector<StateTensor> own;
  for (const NamedTensor& tensor : tensors)
    if (!tensor.duplicate)
      own.push_back({.name = tensor.name,
                     .dtype = tensor.data.local.scalar_type(),
                     .shape = tensor.data.global_shape,
                     .layout = std::make_shared<const TensorLayout>(layout_of(tensor.data, pipeline))});
  return own;
}

std::vector<StateTensor> all_tensors(const std::vector<NamedTensor>& tensors, const DeviceMesh& pipeline) {
  std::vector<StateTensor> own;
  std::string text;
  // The other stages wait for this one's text even if it can't be made.
  const std::string problem = problem_of([&] {
    own = own_tensors(tensors, pipeline);
    text = encode_stage(own);
  });
  std::vector<std::string> texts;
  if (pipeline.size() > 1) texts = pipeline.group()->all_gather_text(text, kPlanLabel);
  TITAN_CHECK(problem.empty(), problem);
  return pipeline.size() > 1 ? decode_stages(texts) : own;
}

constexpr int64_t kAlignment = 64;
constexpr int64_t kHugePageBytes = int64_t{2} << 20;
// Large enough to be worth a thread's time.
constexpr int64_t kCopyBytes = int64_t{16} << 20;

int64_t rounded_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

bool is_direct(const PlannedPiece& piece, const at::Tensor& local) {
  return piece.is_whole_rows && local.is_cpu() && local.is_contiguous();
}

}  // namespace

std::string encode_stage(const std::vector<StateTensor>& tensors) {
  WireWriter out;
  for (const StateTensor& tensor : tensors) {
    out(tensor.name, tensor.dtype, tensor.shape, tensor.layout->axes.size());
    for (const LayoutAxis& axis : tensor.layout->axes) axis_fields(out, axis);
  }
  return out.take();
}

std::vector<StateTensor> decode_stages(const std::vector<std::string>& texts) {
  std::vector<StateTensor> tensors;
  for (const std::string& text : texts) {
    for (WireReader in(text); !in.done();) {
      StateTensor& tensor = tensors.emplace_back();
      in(tensor.name, tensor.dtype, tensor.shape);
      TensorLayout layout;
      for (auto left = in.get<size_t>(); left > 0; --left) axis_fields(in, layout.axes.emplace_back());
      tensor.layout = std::make_shared<const TensorLayout>(std::move(layout));
    }
  }
  return tensors;
}

std::vector<NamedTensor> tensors_of(const std::vector<KeyedState>& states) {
  std::vector<NamedTensor> tensors;
  for (const auto& [key, state] : states) {
    for (const ObjectTensor& tensor : state.tensors) {
      const std::string name = key + "." + tensor.name;
      const at::Tensor& local = tensor.data.local;
      TITAN_CHECK(local.defined() && !is_deferred(local), "checkpoint: tensor '", name,
                  "' has no memory (yet)");
      TITAN_CHECK(local.sizes() == at::IntArrayRef(tensor.data.box.length), "checkpoint: tensor '", name,
                  "' has a local part of shape ", local.sizes(), "; its box says ",
                  at::IntArrayRef(tensor.data.box.length));
      tensors.push_back({name, tensor.data, tensor.duplicate});
    }
  }
  return tensors;
}

SavePlan::SavePlan(const std::vector<NamedTensor>& tensors, const dist::World& world,
                   const DeviceMesh& pipeline)
    : table_(all_tensors(tensors, pipeline), world.size()) {
  for (const NamedTensor& tensor : tensors) {
    TITAN_CHECK(!tensor.duplicate || table_.find(tensor.name), "checkpoint: tensor '", tensor.name,
                "' is a duplicate that another pipeline stage has to save, but no stage has it");
    known_.push_back({tensor.name, tensor.data.local.scalar_type(), tensor.data.global_shape, tensor.data.box,
                      tensor.duplicate});
  }
  const int64_t rank = world.rank();
  std::map<std::string_view, size_t> positions;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (!tensors[i].duplicate) positions.emplace(tensors[i].name, i);
  for (const Piece& piece : table_.pieces_of(rank)) {
    const StateTensor& tensor = table_.tensors()[piece.tensor];
    const auto position = positions.find(tensor.name);
    TITAN_CHECK(position != positions.end(), "checkpoint: by its layout, rank ", rank,
                " holds a part of tensor '", tensor.name, "', but no object there has that tensor");
    PlannedPiece planned{.name = tensor.name, .box = piece.box, .source = position->second, .start = {}};
    const Box& part = tensors[planned.source].data.box;
    planned.is_whole_rows = true;
    for (size_t dim = 0; dim < part.length.size(); ++dim) {
      planned.start.push_back(piece.box.offset[dim] - part.offset[dim]);
      if (dim > 0 && piece.box.length[dim] != part.length[dim]) planned.is_whole_rows = false;
    }
    planned.num_bytes = piece.box.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
    pieces_.push_back(std::move(planned));
  }
}

std::string SavePlan::digest() const { return digest_of(encode_stage(table_.tensors())); }

void SavePlan::check_same(const std::vector<NamedTensor>& tensors) const {
  TITAN_CHECK(tensors.size() == known_.size(), "checkpoint: the objects have ", tensors.size(),
              " tensors; at the first save they had ", known_.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const NamedTensor& now = tensors[i];
    const Known& before = known_[i];
    const bool same = now.name == before.name && now.data.local.scalar_type() == before.dtype &&
                      now.data.global_shape == before.global_shape && now.data.box == before.box &&
                      now.duplicate == before.duplicate;
    TITAN_CHECK(same, "checkpoint: tensor ", i, " is '", now.name, "' (", now.data.local.scalar_type(), " ",
                at::IntArrayRef(now.data.global_shape), "); at the first save it was '", before.name, "' (",
                before.dtype, " ", at::IntArrayRef(before.global_shape),
                "): names, dtypes, shapes and layouts must not change");
  }
}

at::Tensor part_of(const at::Tensor& local, const PlannedPiece& piece) {
  at::Tensor part = local.detach();
  for (size_t dim = 0; dim < piece.start.size(); ++dim)
    part = part.narrow(static_cast<int64_t>(dim), piece.start[dim], piece.box.length[dim]);
  return part;
}

// ---- copying

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

StagingNeed staging_need(const SavePlan& plan, const std::vector<NamedTensor>& tensors, bool in_place) {
  StagingNeed need;
  for (const PlannedPiece& piece : plan.pieces()) {
    const at::Tensor& local = tensors[piece.source].data.local;
    need.offsets.push_back(in_place && is_direct(piece, local) ? -1 : need.num_bytes);
    if (need.offsets.back() >= 0) need.num_bytes += rounded_up(piece.num_bytes, kAlignment);
    need.page_locked = need.page_locked || local.is_cuda();
  }
  return need;
}

StagingBuffer::~StagingBuffer() {
  if (early_.joinable()) early_.join();
  release();
}

void StagingBuffer::release() {
  if (is_locked_) dist::device_backend()->unlock_pages(data_);
  if (data_) ::munmap(data_, static_cast<size_t>(num_bytes_));
  is_locked_ = false;
  data_ = nullptr;
  num_bytes_ = 0;
}

void StagingBuffer::take(const StagingNeed& need) {
  if (need.num_bytes <= num_bytes_ && (is_locked_ || !need.page_locked)) return;
  release();
  const int64_t num_bytes = rounded_up(need.num_bytes, kHugePageBytes);
  void* memory = ::mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TITAN_CHECK(memory != MAP_FAILED, "no host memory for the copy of a checkpoint: ", num_bytes,
              " bytes: ", errno_text(errno));
  // Saves page faults at the first copy. If the kernel refuses, the copy is only slower.
  ::madvise(memory, static_cast<size_t>(num_bytes), MADV_HUGEPAGE);
  data_ = static_cast<char*>(memory);
  num_bytes_ = num_bytes;
  if (!need.page_locked) return;
  // Otherwise the driver makes the pages under its lock, and other threads' launches wait.
  ::madvise(memory, static_cast<size_t>(num_bytes), MADV_POPULATE_WRITE);
  dist::device_backend()->lock_pages(data_, num_bytes_);
  is_locked_ = true;
}

void StagingBuffer::reserve(const StagingNeed& need) {
  if (early_.joinable()) early_.join();
  take(need);
}

void StagingBuffer::reserve_early(StagingNeed need) {
  if (early_.joinable()) early_.join();
  const SignalsBlocked blocked;
  early_ = std::thread([this, need = std::move(need)] {
    try {
      take(need);
    } catch (const std::exception&) {
      release();  // reserve() tries again, and its error is the save's
    }
  });
  pthread_setname_np(early_.native_handle(), "page-lock");
}

Staging::Staging(const SavePlan& plan, const std::vector<NamedTensor>& tensors, StagingBuffer& buffer,
                 bool in_place) {
  at::NoGradGuard no_grad;
  const StagingNeed need = staging_need(plan, tensors, in_place);
  const std::vector<int64_t>& offsets = need.offsets;
  buffer.reserve(need);
  for (size_t i = 0; i < offsets.size(); ++i) {
    const PlannedPiece& piece = plan.pieces()[i];
    const at::Tensor& local = tensors[piece.source].data.local;
    alive_.push_back(local);
    if (offsets[i] < 0) {
      pieces_.push_back({piece.name, piece.box, part_of(local, piece)});
      continue;
    }
    at::Tensor target =
        at::from_blob(buffer.data() + offsets[i], piece.box.length, at::dtype(local.scalar_type()));
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
  const auto* from = static_cast<const char*>(part_of(local, piece).const_data_ptr());
  auto* to = static_cast<char*>(target.mutable_data_ptr());
  for (int64_t done = 0; done < piece.num_bytes; done += kCopyBytes)
    bytes_.push_back({from + done, to + done, std::min(kCopyBytes, piece.num_bytes - done)});
}

void Staging::launch_from_device() {
  if (device_.empty()) return;
  at::NoGradGuard no_grad;
  const at::Device device = device_.front().from.device();
  // LibTorch has 32 streams, and gives them out in turn: another one for each save would become the training's.
  static const dist::Stream side = dist::Stream::create(device);
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
