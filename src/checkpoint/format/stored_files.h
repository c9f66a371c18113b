#pragma once

// Reads and writes the files of a checkpoint in the storage that their path names
// (titan/checkpoint/storage.h), and checks the names in them.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/durable.h"
#include "titan/checkpoint/manifest.h"
#include "titan/checkpoint/storage.h"

namespace titan::checkpoint::detail {

/// An open file that knows its path and counts what is read. Safe to use from several threads.
class InputFile {
 public:
  explicit InputFile(const std::filesystem::path& path) : path_(path), reader_(storage_of(path).open(path)) {}

  const std::filesystem::path& path() const { return path_; }
  int64_t num_bytes() const { return reader_->num_bytes(); }
  int64_t bytes_read() const { return bytes_read_; }
  void read(std::span<std::byte> into, int64_t offset) const {
    reader_->read(into, offset);
    bytes_read_ += static_cast<int64_t>(into.size());
  }
  void check_unchanged() const { reader_->check_unchanged(); }
  void drop(int64_t offset, int64_t num_bytes) const { reader_->drop(offset, num_bytes); }

 private:
  std::filesystem::path path_;
  std::unique_ptr<Storage::Reader> reader_;
  mutable std::atomic<int64_t> bytes_read_{0};
};

/// Throws Error for a file of more than `most_bytes`, before memory is taken for it.
std::string read_text(const std::filesystem::path& path, int64_t most_bytes = int64_t{1} << 30);
/// The contents are durable when it returns; the name becomes durable when its folder is synced.
void write_text(const std::filesystem::path& path, std::string_view text);

Storage::Kind kind_of(const std::filesystem::path& path);
/// Whether the path is a regular file, not a link to one.
inline bool is_file(const std::filesystem::path& path) { return kind_of(path) == Storage::Kind::File; }
/// Whether anything has that name, even a broken link.
inline bool is_there(const std::filesystem::path& path) { return kind_of(path) != Storage::Kind::Nothing; }
/// " is missing" or " isn't a regular file"
std::string not_a_file(const std::filesystem::path& path);
/// Removes a file, or a folder with its contents. Whatever can't be removed is left to the next run.
void remove_quietly(const std::filesystem::path& path);

/// The local storage's writer, with the given calls to the operating system.
std::unique_ptr<Storage::Writer> local_writer(const std::filesystem::path& path, int64_t num_bytes,
                                              FileCalls calls = {});

/// Throws FolderInUse as Storage::lock does, but leaves nothing behind: no folder, no lock, no new holder. On
/// storage that isn't local, does nothing.
void check_unlocked(const std::filesystem::path& folder);

/// 32 hexadecimal digits.
std::string random_id();
/// "titan 0.1.0, torch 2.11.0"
std::string library_text();

// ---- a model saved alone: a folder of safetensors files with whole tensors, and kModelManifestName, whose
// "rank" k is file k. Its texts have kModelForm, and a digest of each of the folder's other files.

constexpr const char* kModelForm = "model.form";  // no object of a state has a key with a dot
inline bool is_model_alone(const Manifest& manifest) { return manifest.texts.contains(kModelForm); }
/// "model.safetensors", or "model-00001-of-00004.safetensors" for number 0 of 4.
std::string model_file_name(int64_t number, int64_t count);
constexpr const char* kModelIndex = "model.safetensors.index.json";
/// Why a file isn't the one with this digest; empty: it is.
std::string digest_problem(const std::filesystem::path& file, const std::string& digest);

/// Why a tensor, an axis or a text can't have this name; empty: it can. Names appear in files, listings and
/// error messages, and must not be mistaken for paths.
std::string name_problem(std::string_view name);

/// The problem of a folder "step-N" whose manifest belongs to another step: it was renamed, or mixed from
/// two. A copy under any other name has none.
std::optional<std::string> step_name_problem(const std::filesystem::path& step_folder,
                                             const Manifest& manifest);

}  // namespace titan::checkpoint::detail
