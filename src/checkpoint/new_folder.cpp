#include "new_folder.h"

#include <unistd.h>

#include "folder_calls.h"
#include "titan/core/error.h"
#include "titan/core/file.h"

namespace titan::detail {
namespace {

namespace fs = std::filesystem;

// Without a trailing slash, which would leave no name.
fs::path named(const fs::path& path) {
  const fs::path normal = fs::absolute(path).lexically_normal();
  return normal.has_filename() ? normal : normal.parent_path();
}

fs::path free_name_beside(const fs::path& path) {
  for (int number = 1;; ++number) {
    fs::path name = path;
    name += number == 1 ? std::string(".old") : str(".old.", number);
    if (!is_there(name)) return name;
  }
}

}  // namespace

NewFolder::NewFolder(const fs::path& path)
    : final_(named(path)),
      temporary_(final_.parent_path() / str(".", final_.filename().string(), ".", ::getpid(), ".tmp")) {
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);  // of a process that had this number before
  make_folder(temporary_);
}

NewFolder::~NewFolder() {
  std::error_code ignored;
  if (!committed_) fs::remove_all(temporary_, ignored);
}

void NewFolder::commit() {
  sync_folder(temporary_);
  const bool replaces = is_there(final_);
  if (replaces) rename_folder(final_, free_name_beside(final_));
  rename_folder(temporary_, final_);
  committed_ = true;
  sync_folder(final_.parent_path());
}

}  // namespace titan::detail
