#pragma once

#include <filesystem>
#include <span>
#include <string_view>

namespace titan::train {

/// The pieces, one behind the other, as a gzip file; whole or not there (core/file.h). Throws Error.
void write_gzip_atomic(const std::filesystem::path& path, std::span<const std::string_view> pieces);

}  // namespace titan::train
