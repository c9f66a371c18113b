// Parses the header of a safetensors file.

#include "checkpoint/format/safetensors_header.h"

#include "fuzz.h"

namespace titan::fuzz {
namespace {

using detail::SafetensorsHeader;

constexpr const char* kFile = "strange.safetensors";

SafetensorsHeader parse(std::string_view file) {
  const size_t length = detail::checked_header_length(file, file.size(), kFile);
  const size_t data_start = sizeof(uint64_t) + length;
  return detail::parse_safetensors_header(file.substr(sizeof(uint64_t), length), data_start, file.size(),
                                          kFile);
}

int64_t total_bytes(const SafetensorsHeader& header) {
  int64_t total = 0;
  for (const auto& [name, info] : header.tensors) total += info.num_bytes;
  return total;
}

void require_same(const SafetensorsHeader& a, const SafetensorsHeader& b) {
  require(a.metadata == b.metadata, "metadata reads back");
  require(a.tensors.size() == b.tensors.size(), "as many tensors read back");
  for (const auto& [name, info] : a.tensors) {
    const auto found = b.tensors.find(name);
    require(found != b.tensors.end(), "a tensor reads back");
    require(found->second.dtype == info.dtype && found->second.shape == info.shape &&
                found->second.num_bytes == info.num_bytes,
            "what is said of a tensor reads back");
  }
}

}  // namespace

void fuzz_input(std::string_view file) {
  SafetensorsHeader header;
  if (!accepted(kFile, [&] { header = parse(file); })) return;
  std::vector<SafetensorsEntry> entries;
  for (const std::string& name : header.names) {
    const SafetensorsInfo& info = header.tensors.at(name);
    require(info.offset >= 0 && info.num_bytes >= 0, "a tensor has an offset and a size");
    require(static_cast<size_t>(info.offset + info.num_bytes) <= file.size(), "a tensor lies in the file");
    entries.push_back({name, info.dtype, info.shape});
  }
  // An accepted header can be written, and is the same when it is read back.
  const std::string bytes = detail::make_safetensors_header(entries, header.metadata);
  const std::string again = bytes + std::string(total_bytes(header), '\0');
  require_same(header, parse(again));
}

}  // namespace titan::fuzz
