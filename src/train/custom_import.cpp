#include <dlfcn.h>

#include <filesystem>
#include <set>
#include <string>

#include "titan/core/error.h"
#include "titan/train/job_config.h"

namespace titan::train {

namespace {

constexpr const char* kEntryPoint = "titan_register";

/// Where the loader looked for it.
std::string search_of(const std::string& path) {
  if (path.find('/') == std::string::npos)
    return "; a name without a '/' is looked for in the loader's own folders (LD_LIBRARY_PATH and the "
           "system's)";
  const std::filesystem::path absolute = std::filesystem::absolute(path).lexically_normal();
  return path.front() == '/' ? ""
                             : str("; relative to the working directory, not to the config file, this is ",
                                   absolute.string());
}

void open_and_register(const std::string& path) {
  // Never closed: what it registered points into it.
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw ConfigError(str("can't be opened: ", ::dlerror(), search_of(path)));
  auto entry = reinterpret_cast<void (*)()>(::dlsym(library, kEntryPoint));
  if (!entry) throw ConfigError(str("has no function `extern \"C\" void ", kEntryPoint, "()`"));
  entry();
}

}  // namespace

void import_custom_code(const std::string& path) {
  static std::set<std::string>
      imported;  // names stay registered for the life of the process, and so does this
  if (path.empty() || imported.count(path)) return;
  open_and_register(path);
  imported.insert(path);
}

}  // namespace titan::train
