#include "titan/checkpoint/safetensors.h"

#include <sys/mman.h>
#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>

#include "checkpoint/format/safetensors_header.h"
#include "core/file.h"
#include "titan/checkpoint/storage.h"
#include "titan/core/error.h"

namespace titan {

struct SafetensorsFile::Contents {
  std::filesystem::path path;
  MappedFile map;
  detail::SafetensorsHeader header;
};

namespace {

// LibTorch takes a mutable pointer; nobody writes through it.
void* address_of(const MappedFile& map, int64_t offset) {
  return const_cast<std::byte*>(map.bytes().data() + offset);
}

bool is_aligned(const void* address, size_t alignment) {
  return reinterpret_cast<uintptr_t>(address) % alignment == 0;
}

void check_box(const Box& box, const SafetensorsInfo& info, std::string_view name, const std::string& path) {
  bool fits = box.offset.size() == info.shape.size() && box.length.size() == info.shape.size();
  for (size_t dim = 0; fits && dim < info.shape.size(); ++dim) {
    fits = box.offset[dim] >= 0 && box.length[dim] >= 0 && box.offset[dim] <= info.shape[dim] &&
           box.length[dim] <= info.shape[dim] - box.offset[dim];
  }
  TITAN_CHECK(fits, path, ": tensor '", name, "' of shape ", at::IntArrayRef(info.shape), " has no part at ",
              at::IntArrayRef(box.offset), " of lengths ", at::IntArrayRef(box.length));
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) {
  MappedFile map(path);
  size_t data_start =
      sizeof(uint64_t) + detail::checked_header_length(map.text(), map.text().size(), path.string());
  auto header =
      detail::parse_safetensors_header(map.text().substr(sizeof(uint64_t), data_start - sizeof(uint64_t)),
                                       data_start, map.text().size(), path.string());
  contents_ = std::make_shared<const Contents>(Contents{path, std::move(map), std::move(header)});
}

const std::filesystem::path& SafetensorsFile::path() const { return contents_->path; }
const std::vector<std::string>& SafetensorsFile::names() const { return contents_->header.names; }
const SafetensorsMetadata& SafetensorsFile::metadata() const { return contents_->header.metadata; }

bool SafetensorsFile::contains(std::string_view name) const {
  return contents_->header.tensors.find(name) != contents_->header.tensors.end();
}

const SafetensorsInfo& SafetensorsFile::info(std::string_view name) const {
  auto found = contents_->header.tensors.find(name);
  if (found != contents_->header.tensors.end()) return found->second;
  std::string message = str(path().string(), ": no tensor '", name, "'");
  for (const auto& near : nearest_names(name, names(), 3)) message += str("; there is '", near, "'");
  throw Error(message);
}

at::Tensor SafetensorsFile::tensor(std::string_view name) const {
  const SafetensorsInfo& about = info(name);
  void* data = address_of(contents_->map, about.offset);
  bool viewable = about.num_bytes > 0 && is_aligned(data, c10::elementSize(about.dtype));
  if (!viewable) return read_slice(name, Box{std::vector<int64_t>(about.shape.size(), 0), about.shape});
  auto keep_map = [contents = contents_](void*) {};
  return at::from_blob(data, about.shape, keep_map, at::dtype(about.dtype));
}

void SafetensorsFile::drop_pages() const {
  const auto bytes = contents_->map.bytes();
  // Only a hint: if it is ignored the pages stay until memory is short.
  if (!bytes.empty()) ::madvise(const_cast<std::byte*>(bytes.data()), bytes.size(), MADV_DONTNEED);
}

at::Tensor SafetensorsFile::read_slice(std::string_view name, const Box& box) const {
  const SafetensorsInfo& about = info(name);
  check_box(box, about, name, path().string());
  at::Tensor slice = at::empty(box.length, at::dtype(about.dtype));
  read_slice(name, box, slice);
  return slice;
}

void SafetensorsFile::read_slice(std::string_view name, const Box& box, const at::Tensor& target) const {
  const SafetensorsInfo& about = info(name);
  check_box(box, about, name, path().string());
  TITAN_CHECK(target.device().is_cpu() && target.is_contiguous() && target.scalar_type() == about.dtype &&
                  target.sizes() == at::IntArrayRef(box.length),
              path().string(), ": '", name, "' is read into a contiguous tensor ",
              at::IntArrayRef(box.length), " of ", about.dtype, " on the CPU, given ", target.sizes(), " of ",
              target.scalar_type(), " on ", target.device());
  if (target.numel() == 0) return;
  // As bytes, [..., element size], alignment doesn't matter.
  auto element_size = static_cast<int64_t>(target.element_size());
  std::vector<int64_t> byte_shape = about.shape;
  byte_shape.push_back(element_size);
  at::Tensor bytes =
      at::from_blob(address_of(contents_->map, about.offset), byte_shape, at::dtype(at::kByte));
  for (size_t dim = 0; dim < box.length.size(); ++dim) {
    bytes = bytes.narrow(static_cast<int64_t>(dim), box.offset[dim], box.length[dim]);
  }
  at::from_blob(target.data_ptr(), bytes.sizes(), at::dtype(at::kByte)).copy_(bytes);
}

namespace {

void check_announced(const at::Tensor& tensor, const SafetensorsEntry& entry) {
  TITAN_CHECK(tensor.sizes() == at::IntArrayRef(entry.shape) && tensor.scalar_type() == entry.dtype,
              "tensor '", entry.name, "' is ", tensor.sizes(), " of ", tensor.scalar_type(),
              ", announced as ", at::IntArrayRef(entry.shape), " of ", entry.dtype);
}

void append_tensor(const AppendBytes& append, const at::Tensor& tensor) {
  at::Tensor data = tensor.detach().to(at::kCPU).contiguous();
  append({static_cast<const std::byte*>(data.const_data_ptr()), data.nbytes()});
}

int64_t file_bytes(const std::string& header, const std::vector<SafetensorsEntry>& entries) {
  auto bytes = static_cast<int64_t>(header.size());
  for (const SafetensorsEntry& entry : entries)
    bytes += c10::multiply_integers(entry.shape) * static_cast<int64_t>(c10::elementSize(entry.dtype));
  return bytes;
}

}  // namespace

void sort_for_file(std::vector<SafetensorsEntry>& entries) {
  auto key = [](const SafetensorsEntry& entry) {
    return std::pair<int64_t, const std::string&>(-static_cast<int64_t>(c10::elementSize(entry.dtype)),
                                                  entry.name);
  };
  std::sort(entries.begin(), entries.end(),
            [&](const SafetensorsEntry& a, const SafetensorsEntry& b) { return key(a) < key(b); });
}

void write_safetensors_in_parts(const std::filesystem::path& path,
                                const std::vector<SafetensorsEntry>& entries,
                                const SafetensorsMetadata& metadata, const ProduceParts& produce) {
  checkpoint::require_local(path, "a safetensors file");
  std::string header = detail::make_safetensors_header(entries, metadata);
  const auto write = [&](const AppendBytes& append) {
    append(std::as_bytes(std::span(header)));
    for (size_t index = 0; index < entries.size(); ++index) {
      const SafetensorsEntry& entry = entries[index];
      int64_t missing = c10::multiply_integers(entry.shape);
      produce(index, [&](const at::Tensor& rows) {
        TITAN_CHECK(rows.scalar_type() == entry.dtype && rows.numel() <= missing, "tensor '", entry.name,
                    "': a part of ", rows.numel(), " elements of ", rows.scalar_type(), ", expected at most ",
                    missing, " of ", entry.dtype);
        missing -= rows.numel();
        append_tensor(append, rows);
      });
      TITAN_CHECK(missing == 0, "tensor '", entry.name, "': its parts lack ", missing, " elements");
    }
  };
  write_file_atomic(path, write, file_bytes(header, entries));
}

void write_safetensors(const std::filesystem::path& path, const std::vector<SafetensorsEntry>& entries,
                       const SafetensorsMetadata& metadata, const ProduceTensor& produce) {
  write_safetensors_in_parts(path, entries, metadata, [&](size_t index, const AppendTensor& append) {
    const at::Tensor tensor = produce(index);
    check_announced(tensor, entries[index]);
    append(tensor);
  });
}

void save_safetensors(const std::filesystem::path& path,
                      const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                      const SafetensorsMetadata& metadata) {
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, at::Tensor> by_name;
  for (const auto& [name, tensor] : tensors) {
    TITAN_CHECK(tensor.defined(), "tensor '", name, "' is undefined");
    TITAN_CHECK(by_name.emplace(name, tensor).second, "tensor '", name, "' is given twice");
    entries.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  }
  sort_for_file(entries);
  write_safetensors(path, entries, metadata, [&](size_t index) { return by_name.at(entries[index].name); });
}

}  // namespace titan
