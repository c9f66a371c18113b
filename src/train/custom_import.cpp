#include <dlfcn.h>

#include <set>
#include <string>

#include "titan/core/error.h"
#include "titan/train/job_config.h"

namespace titan::train {

namespace {

constexpr const char* kEntryPoint = "titan_register";

void open_and_register(const std::string& path) {
  // Never closed: what it registered points into it.
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw ConfigError(str("can't be opened: ", ::dlerror()));
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
