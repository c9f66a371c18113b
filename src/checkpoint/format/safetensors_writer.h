#pragma once

// Writes safetensors files of whole tensors with a checksum of each MiB in their metadata, as in a rank's
// file, so that damage is found when they are read. Other readers ignore the metadata.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "checkpoint/format/rank_file.h"
#include "core/durable.h"
#include "titan/checkpoint/safetensors.h"

namespace titan::detail {

/// The size of the file, before it is written.
int64_t checked_file_bytes(const std::vector<SafetensorsEntry>& entries, const SafetensorsMetadata& metadata);

class SafetensorsWriter {
 public:
  /// Reserves the space. `entries` are in the order of sort_for_file.
  SafetensorsWriter(const std::filesystem::path& path, std::vector<SafetensorsEntry> entries,
                    SafetensorsMetadata metadata);

  /// Takes the next rows of entries[index], on any device, in its dtype. Tensors come in order.
  void append(size_t index, const at::Tensor& rows);
  /// Writes the header and syncs; then the file appears under its name.
  checkpoint::WrittenFile finish();

 private:
  void start(size_t index);
  void add(std::span<const std::byte> bytes);
  void write_blocks(std::span<const std::byte> bytes);
  void write(std::span<const std::byte> bytes, int64_t offset);

  std::vector<SafetensorsEntry> entries_;
  SafetensorsMetadata metadata_;
  checkpoint::detail::Checksums checksums_;
  AtomicFile file_;
  int64_t offset_;                // position of the next byte
  size_t current_ = 0;            // the tensor that is being written
  int64_t missing_ = 0;           // its bytes that haven't been appended
  size_t next_block_ = 0;         // in the tensor
  std::vector<std::byte> block_;  // the beginning of a block
  bool finite_ = true;
};

/// As write_safetensors_in_parts.
checkpoint::WrittenFile write_checked(const std::filesystem::path& path,
                                      const std::vector<SafetensorsEntry>& entries,
                                      const SafetensorsMetadata& metadata, const ProduceParts& produce);

}  // namespace titan::detail
