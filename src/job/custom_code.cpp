// experimental.custom_import: a shared object of the user's that registers models, plans, optimizers, ...

#include <dlfcn.h>
#include <link.h>

#include <cstddef>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include <c10/util/StringUtil.h>

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

/// The loader's folders: those of LD_LIBRARY_PATH and its own. Those of ld.so.conf aren't listed.
std::vector<std::string> loader_folders() {
  void* const program = ::dlopen(nullptr, RTLD_LAZY);
  Dl_serinfo size;
  TITAN_CHECK(program && ::dlinfo(program, RTLD_DI_SERINFOSIZE, &size) == 0, "dlinfo: ", ::dlerror());
  std::vector<std::byte> memory(size.dls_size);
  auto* const info = reinterpret_cast<Dl_serinfo*>(memory.data());
  *info = size;
  TITAN_CHECK(::dlinfo(program, RTLD_DI_SERINFO, info) == 0, "dlinfo: ", ::dlerror());
  std::vector<std::string> folders;
  for (unsigned i = 0; i < info->dls_cnt; ++i) folders.emplace_back(info->dls_serpath[i].dls_name);
  return folders;
}

/// The file that `path` names. A name without a '/' is searched in the loader's folders: loading it to learn
/// where it is would run its initializers before check_build().
std::string file_of(const std::string& path) {
  std::error_code error;
  std::string searched;
  if (path.find('/') != std::string::npos) {
    if (std::filesystem::is_regular_file(path, error)) return path;
    if (path.front() != '/')
      searched = str("; relative to the working directory, not to the config file, this is ",
                     std::filesystem::absolute(path).lexically_normal().string());
  } else {
    const std::vector<std::string> folders = loader_folders();
    for (const std::string& folder : folders)
      if (std::string file = folder + "/" + path; std::filesystem::is_regular_file(file, error)) return file;
    searched =
        str("; a name without a '/' is searched only in LD_LIBRARY_PATH and the loader's own folders: ",
            c10::Join(", ", folders), "; write ./", path, " for the working directory");
  }
  throw ConfigError(str("there is no such file", searched));
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

void open_and_register(const std::string& path) {
  const std::string file = file_of(path);
  check_build(file);
  // Never closed: what it registered points into it.
  void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
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
