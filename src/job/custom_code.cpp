// experimental.custom_import: a shared object of the user's that registers models, plans, optimizers, ...

#include <dlfcn.h>
#include <link.h>

#include <filesystem>
#include <set>
#include <string>

#include "core/file.h"
#include "job/job_config.h"
#include "titan/core/build_stamp.h"
#include "titan/core/error.h"

namespace titan::train {

namespace {

constexpr const char* kEntryPoint = "titan_register";
// How cmake/build_stamp.cmake begins a stamp. In two parts, so that this file doesn't hold one.
const std::string kStamp = std::string("titan build ") + "stamp: ";
constexpr size_t kMaxStampBytes = 200;

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

// Which builds of LibTitan the parts of a shared object were compiled against.
std::set<std::string> builds_in(const std::string& file) {
  const std::string bytes = read_file(file);
  std::set<std::string> builds;
  for (size_t at = bytes.find(kStamp); at != std::string::npos; at = bytes.find(kStamp, at + 1)) {
    const size_t start = at + kStamp.size();
    const size_t end = bytes.find(';', start);
    if (end != std::string::npos && end - start < kMaxStampBytes)
      builds.insert(bytes.substr(start, end - start));
  }
  return builds;
}

// Types may have other layouts in another build, so a mismatch is found before anything of it runs.
void check_build(const std::string& file) {
  const std::set<std::string> builds = builds_in(file);
  if (builds.empty())
    throw ConfigError(
        str("doesn't say which build of LibTitan it was compiled against: it includes no header "
            "of a registry, or those of a version without stamps; this program is ",
            TITAN_BUILD));
  for (const std::string& build : builds)
    if (build != TITAN_BUILD)
      throw ConfigError(str("was compiled against ", build, ", but this program is ", TITAN_BUILD,
                            ": compile it again against this program's headers"));
}

std::string file_of(void* library) {
  link_map* map = nullptr;
  return ::dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
}

void open_and_register(const std::string& path) {
  const bool has_folder = path.find('/') != std::string::npos;
  std::error_code error;
  if (has_folder && std::filesystem::is_regular_file(path, error)) check_build(path);
  // Never closed: what it registered points into it.
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw ConfigError(str("can't be opened: ", ::dlerror(), search_of(path)));
  if (!has_folder) check_build(file_of(library));
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
