#include "checkpoint/format/safetensors_writer.h"

#include <algorithm>
#include <map>
#include <utility>

#include <c10/util/accumulate.h>

#include "titan/checkpoint/storage.h"
#include "titan/core/error.h"

namespace titan {
namespace detail {
namespace {

using checkpoint::detail::Checksums;

constexpr auto kBlock = static_cast<size_t>(checkpoint::kBlockBytes);

Checksums blank_checksums(const std::vector<SafetensorsEntry>& entries) {
  make_safetensors_header(entries, {});  // checks the sizes before memory is taken for checksums
  Checksums checksums;
  for (const SafetensorsEntry& entry : entries)
    checksums.emplace_back(static_cast<size_t>(checkpoint::detail::num_blocks(num_bytes(entry))));
  return checksums;
}

// Its length doesn't depend on the values of the checksums.
std::string header_of(const std::vector<SafetensorsEntry>& entries, SafetensorsMetadata metadata,
                      const Checksums& checksums) {
  metadata[checkpoint::detail::kChecksumsKey] = checkpoint::detail::kChecksumsForm;
  for (size_t i = 0; i < entries.size(); ++i) {
    const Box whole{std::vector<int64_t>(entries[i].shape.size(), 0), entries[i].shape};
    const bool is_new =
        metadata.emplace(entries[i].name, checkpoint::detail::piece_text(whole, checksums[i])).second;
    TITAN_CHECK(is_new, "'", entries[i].name, "' names two tensors, or a tensor and a key of the metadata");
  }
  return make_safetensors_header(entries, metadata);
}

}  // namespace

int64_t checked_file_bytes(const std::vector<SafetensorsEntry>& entries,
                           const SafetensorsMetadata& metadata) {
  auto bytes = static_cast<int64_t>(header_of(entries, metadata, blank_checksums(entries)).size());
  for (const SafetensorsEntry& entry : entries) bytes += num_bytes(entry);
  return bytes;
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::vector<SafetensorsEntry> entries,
                                     SafetensorsMetadata metadata)
    : entries_(std::move(entries)),
      metadata_(std::move(metadata)),
      checksums_(blank_checksums(entries_)),
      file_(path, checked_file_bytes(entries_, metadata_)),
      offset_(static_cast<int64_t>(header_of(entries_, metadata_, checksums_).size())) {
  if (!entries_.empty()) missing_ = num_bytes(entries_[0]);
  block_.reserve(kBlock);
}

void SafetensorsWriter::append(size_t index, const at::Tensor& rows) {
  start(index);
  const SafetensorsEntry& entry = entries_.at(index);
  const auto num_bytes = static_cast<int64_t>(rows.nbytes());
  TITAN_CHECK(rows.scalar_type() == entry.dtype && num_bytes <= missing_, "tensor '", entry.name,
              "': a part of ", rows.numel(), " elements of ", rows.scalar_type(), ", expected at most ",
              missing_ / static_cast<int64_t>(c10::elementSize(entry.dtype)), " of ", entry.dtype);
  missing_ -= num_bytes;
  const at::Tensor data = rows.detach().to(at::kCPU).contiguous();
  add({static_cast<const std::byte*>(data.const_data_ptr()), data.nbytes()});
  if (missing_ > 0 || block_.empty()) return;
  write_blocks(block_);
  block_.clear();
}

// Ends the tensors before it.
void SafetensorsWriter::start(size_t index) {
  TITAN_CHECK(index >= current_ && index <= entries_.size(), "tensor ", index, " comes after ", current_);
  while (current_ < index) {
    const SafetensorsEntry& entry = entries_[current_];
    TITAN_CHECK(missing_ == 0, "tensor '", entry.name, "': its parts lack ",
                missing_ / static_cast<int64_t>(c10::elementSize(entry.dtype)), " elements");
    ++current_;
    next_block_ = 0;
    missing_ = current_ < entries_.size() ? num_bytes(entries_[current_]) : 0;
  }
}

// Whole blocks are written from where they are.
void SafetensorsWriter::add(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const bool copies = !block_.empty() || bytes.size() < kBlock;
    const size_t taken =
        copies ? std::min(bytes.size(), kBlock - block_.size()) : bytes.size() / kBlock * kBlock;
    const auto part = bytes.first(taken);
    bytes = bytes.subspan(taken);
    if (!copies) {
      write_blocks(part);
      continue;
    }
    block_.insert(block_.end(), part.begin(), part.end());
    if (block_.size() < kBlock) continue;
    write_blocks(block_);
    block_.clear();
  }
}

void SafetensorsWriter::write_blocks(std::span<const std::byte> bytes) {
  for (size_t at = 0; at < bytes.size(); at += kBlock) {
    const auto block = bytes.subspan(at, std::min(kBlock, bytes.size() - at));
    checksums_[current_][next_block_++] = checkpoint::detail::checksum_of(block);
    finite_ = finite_ && checkpoint::detail::all_finite(block, entries_[current_].dtype);
  }
  write(bytes, offset_);
  file_.file().start_write_back(offset_, static_cast<int64_t>(bytes.size()));
  offset_ += static_cast<int64_t>(bytes.size());
}

void SafetensorsWriter::write(std::span<const std::byte> bytes, int64_t offset) {
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};  // only read
  file_.file().write({&part, 1}, offset);
}

// The header is written last: without it, a file can't be mistaken for a whole one.
checkpoint::WrittenFile SafetensorsWriter::finish() {
  start(entries_.size());
  const std::string header = header_of(entries_, metadata_, checksums_);
  write(std::as_bytes(std::span(header)), 0);
  file_.commit();
  return {.record = {.num_bytes = offset_, .header_digest = checkpoint::digest_of(header)},
          .finite = finite_};
}

checkpoint::WrittenFile write_checked(const std::filesystem::path& path,
                                      const std::vector<SafetensorsEntry>& entries,
                                      const SafetensorsMetadata& metadata, const ProduceParts& produce) {
  checkpoint::require_local(path, "a safetensors file");
  SafetensorsWriter writer(path, entries, metadata);
  for (size_t index = 0; index < entries.size(); ++index)
    produce(index, [&](const at::Tensor& rows) { writer.append(index, rows); });
  return writer.finish();
}

}  // namespace detail

int64_t num_bytes(const SafetensorsEntry& entry) {
  return c10::multiply_integers(entry.shape) * static_cast<int64_t>(c10::elementSize(entry.dtype));
}

void sort_for_file(std::vector<SafetensorsEntry>& entries) {
  std::ranges::sort(entries, {}, [](const SafetensorsEntry& entry) {
    return std::pair<int64_t, const std::string&>(-static_cast<int64_t>(c10::elementSize(entry.dtype)),
                                                  entry.name);
  });
}

void write_safetensors_in_parts(const std::filesystem::path& path,
                                const std::vector<SafetensorsEntry>& entries,
                                const SafetensorsMetadata& metadata, const ProduceParts& produce) {
  detail::write_checked(path, entries, metadata, produce);
}

void write_safetensors(const std::filesystem::path& path, const std::vector<SafetensorsEntry>& entries,
                       const SafetensorsMetadata& metadata, const ProduceTensor& produce) {
  write_safetensors_in_parts(path, entries, metadata, [&](size_t index, const AppendTensor& append) {
    const at::Tensor tensor = produce(index);
    const SafetensorsEntry& entry = entries[index];
    TITAN_CHECK(tensor.sizes() == at::IntArrayRef(entry.shape) && tensor.scalar_type() == entry.dtype,
                "tensor '", entry.name, "' is ", tensor.sizes(), " of ", tensor.scalar_type(),
                ", announced as ", at::IntArrayRef(entry.shape), " of ", entry.dtype);
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
