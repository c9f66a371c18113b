#pragma once

// A folder that is whole or not there, as core/file.h for files.

#include <filesystem>

namespace titan::detail {

/// Made under a temporary name, `.NAME.PID.tmp`, in the parent of its own; removed by the destructor unless
/// commit() gave it its name.
class NewFolder {
 public:
  explicit NewFolder(const std::filesystem::path& path);
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  /// Where its files are to be written.
  const std::filesystem::path& path() const { return temporary_; }
  /// Renames it, and syncs. What has that name already is kept as NAME.old, NAME.old.2, ...
  void commit();

 private:
  std::filesystem::path final_, temporary_;
  bool committed_ = false;
};

}  // namespace titan::detail
