#include <algorithm>

#include <c10/util/accumulate.h>

#include "safetensors_dtype.h"
#include "safetensors_header.h"
#include "titan/checkpoint/safetensors.h"
#include "titan/core/error.h"
#include "titan/core/file.h"

namespace titan {
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

void write_safetensors(const std::filesystem::path& path, const std::vector<SafetensorsEntry>& entries,
                       const SafetensorsMetadata& metadata, const ProduceTensor& produce) {
  std::string header = detail::make_safetensors_header(entries, metadata);
  const auto write = [&](const AppendBytes& append) {
    append(std::as_bytes(std::span(header)));
    for (size_t index = 0; index < entries.size(); ++index) {
      at::Tensor tensor = produce(index);
      check_announced(tensor, entries[index]);
      append_tensor(append, tensor);
    }
  };
  write_file_atomic(path, write, file_bytes(header, entries));
}

void write_safetensors_in_parts(const std::filesystem::path& path,
                                const std::vector<SafetensorsEntry>& entries,
                                const SafetensorsMetadata& metadata, const ProduceParts& produce) {
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
