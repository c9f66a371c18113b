#pragma once

// Reading and checking a safetensors header: the part of the format where a hostile file could do harm.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

#include "titan/checkpoint/safetensors.h"

namespace titan::detail {

/// The dtype of this name in the format; empty for one that we don't read.
std::optional<c10::ScalarType> dtype_of_safetensors_name(std::string_view name);
/// The format's name of a dtype. Throws Error for one that it can't hold or that we don't write.
std::string_view safetensors_name_of(c10::ScalarType dtype);

struct SafetensorsHeader {
  std::vector<std::string> names;  // by offset
  std::map<std::string, SafetensorsInfo, std::less<>> tensors;
  SafetensorsMetadata metadata;
};

/// "PATH: no tensor 'NAME'; there is 'NEAR'"
std::string no_tensor_text(const std::string& path, std::string_view name,
                           const std::vector<std::string>& known);

/// Whether a box is a part of a tensor of this shape.
bool is_inside(const Box& box, const std::vector<int64_t>& shape);

/// The length of the JSON header. `beginning` is a file's first 8 bytes, or all of a shorter file.
size_t checked_header_length(std::string_view beginning, size_t file_size, const std::string& path);

/// Parses the JSON text and checks that the tensors tile the file's data part exactly, without holes or
/// overlaps. `data_start` is the first byte after the header. Throws Error that names `path`.
SafetensorsHeader parse_safetensors_header(std::string_view json, size_t data_start, size_t file_size,
                                           const std::string& path);

/// The 8 length bytes and the JSON text, padded with spaces to a multiple of 8.
std::string make_safetensors_header(const std::vector<SafetensorsEntry>& entries,
                                    const SafetensorsMetadata& metadata);

}  // namespace titan::detail
