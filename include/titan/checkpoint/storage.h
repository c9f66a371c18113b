#pragma once

// Where checkpoints are stored: on a local or shared disk, or in a storage that the program registers under a
// URL scheme.
//
//   titan::checkpoint::storages().add("s3", std::make_shared<S3Storage>(...));   // before a path is used
//   titan train ... --checkpoint.folder s3:/bucket/run --checkpoint.last_save_model_only false
//
// Paths stay std::filesystem::path: a first element "SCHEME:" names a registered storage ("s3:/bucket/run"
// and "s3://bucket/run" are the same), everything else is local. Saving, loading, listing, verifying,
// replacing and removing steps go through storage_of(path) and nothing else. Models written alone (one
// safetensors file, a Hugging Face folder) and states in the hosts' memory need a local path.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "titan/core/error.h"
#include "titan/core/registry.h"

namespace titan::checkpoint {

/// Another process writes to the folder. A run that is refused for it isn't started again.
class FolderInUse : public Error {
 public:
  using Error::Error;
};

/// The operations on folders and files that saves and loads need. Every function may be called from several
/// threads and throws Error that names the path. Links are never followed: they have Kind::Other.
class Storage {
 public:
  enum class Kind { Nothing, File, Folder, Other };
  struct Status {
    Kind kind = Kind::Nothing;
    int64_t num_bytes = 0;  ///< size of a File
  };

  /// An open file.
  class Reader {
   public:
    virtual ~Reader() = default;
    /// The file's size when it was opened.
    virtual int64_t num_bytes() const = 0;
    /// Fills `into`. Throws Error if the file ends too early.
    virtual void read(std::span<std::byte> into, int64_t offset) const = 0;
    /// Throws Error when the file's size has changed since it was opened.
    virtual void check_unchanged() const {}
    /// A hint: these bytes won't be read again; with 0 bytes, everything after the offset.
    virtual void drop(int64_t /*offset*/, int64_t /*num_bytes*/) const {}
  };

  /// A file being written. It is removed if it is destroyed before finish().
  class Writer {
   public:
    virtual ~Writer() = default;
    /// Writes `parts` one after the other, from `offset` on. Every byte is written once, in any order.
    virtual void write(std::span<const std::span<const std::byte>> parts, int64_t offset) = 0;
    /// Returns once the contents are durable. The file's name becomes durable when sync() on its folder
    /// returns.
    virtual void finish() = 0;
  };

  virtual ~Storage() = default;

  /// The names in a folder, in any order; none where the folder doesn't exist.
  virtual std::vector<std::string> list(const std::filesystem::path& folder) = 0;
  virtual Status status(const std::filesystem::path& path) = 0;
  virtual std::unique_ptr<Reader> open(const std::filesystem::path& file) = 0;
  /// Makes a file of `num_bytes` in an existing folder, replacing one of that name.
  virtual std::unique_ptr<Writer> create(const std::filesystem::path& file, int64_t num_bytes) = 0;
  /// Makes the folders above it too.
  virtual void make_folder(const std::filesystem::path& folder) = 0;
  /// Renames a folder atomically: this makes a step visible. `to` doesn't exist.
  virtual void rename(const std::filesystem::path& from, const std::filesystem::path& to) = 0;
  /// Exchanges the names of two folders atomically. Returns false if this storage can't.
  virtual bool exchange(const std::filesystem::path& /*a*/, const std::filesystem::path& /*b*/) {
    return false;
  }
  /// Removes a file, or a folder with its contents. Does nothing if it doesn't exist.
  virtual void remove(const std::filesystem::path& path) = 0;
  /// Returns when the names in a folder are durable.
  virtual void sync(const std::filesystem::path& /*folder*/) {}

  /// Makes the folder and locks it until the handle is released or the process ends. Throws FolderInUse that
  /// names the process that holds the lock. Returns null if this storage has no locks: then leftovers of killed
  /// runs stay.
  virtual std::shared_ptr<const void> lock(const std::filesystem::path& folder);
  /// Why this process can't write to a folder; empty: it can.
  virtual std::string write_problem(const std::filesystem::path& /*folder*/) { return ""; }
};

/// The registered storages by URL scheme ("s3").
Registry<std::shared_ptr<Storage>>& storages();

/// Throws ConfigError for a scheme that isn't registered.
Storage& storage_of(const std::filesystem::path& path);
bool is_local(const std::filesystem::path& path);
/// parent / folder, or `folder` itself where it is absolute or names a storage.
std::filesystem::path joined(const std::filesystem::path& parent, const std::filesystem::path& folder);
/// Removes "." and ".."; makes a local path absolute.
std::filesystem::path normalized(const std::filesystem::path& path);
/// Throws ConfigError where `path` isn't local: "PATH: WHAT has to be on a local path".
void require_local(const std::filesystem::path& path, const std::string& what);

}  // namespace titan::checkpoint
