#pragma once

// What the operating system does with folders, as Errors that name the path and the reason.

#include <filesystem>

namespace titan::detail {

/// Makes the names in it durable.
void sync_folder(const std::filesystem::path& folder);
void rename_folder(const std::filesystem::path& from, const std::filesystem::path& to);
/// Swaps two names at one instant. False where the file system or the kernel can't.
bool exchange_folders(const std::filesystem::path& a, const std::filesystem::path& b);
/// With all that is in it; a link itself, not what it leads to. What isn't there is removed already.
void remove_folder(const std::filesystem::path& folder);
/// Something of that name, be it a broken link.
bool is_there(const std::filesystem::path& path);
/// Itself a folder, not a link to one.
bool is_own_folder(const std::filesystem::path& path);
/// Itself a regular file, not a link to one.
bool is_own_file(const std::filesystem::path& path);

}  // namespace titan::detail
