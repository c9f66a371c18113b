#include "data/sources/files.h"

#include <fcntl.h>
#include <fnmatch.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "core/hash.h"
#include "titan/core/error.h"

namespace titan::data {
namespace {

namespace fs = std::filesystem;
using Components = std::vector<std::string>;

bool is_hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

// Adds what matches the components from `index` on below `folder` to `found`.
void expand(const fs::path& folder, const Components& components, size_t index, std::set<fs::path>& found) {
  if (index == components.size()) {
    if (fs::exists(folder)) found.insert(folder);
    return;
  }
  const std::string& component = components[index];
  if (!is_glob(component)) return expand(folder / component, components, index + 1, found);
  bool any_depth = component == "**";
  if (any_depth) expand(folder, components, index + 1, found);
  std::error_code error;  // something that can't be listed has no matches
  for (const auto& entry : fs::directory_iterator(folder.empty() ? "." : folder, error)) {
    fs::path inner = folder / entry.path().filename();
    if (any_depth && entry.is_directory(error) && !is_hidden(inner)) expand(inner, components, index, found);
    if (!any_depth && fnmatch(component.c_str(), entry.path().filename().c_str(), FNM_PERIOD) == 0)
      expand(inner, components, index + 1, found);
  }
}

}  // namespace

bool is_glob(const std::string& path) { return path.find_first_of("*?[") != path.npos; }

fs::path glob_base(const std::string& pattern) {
  fs::path base;
  for (const auto& component : fs::path(pattern)) {
    if (is_glob(component.string())) break;
    base /= component;
  }
  return base;
}

std::vector<fs::path> expand_glob(const std::string& pattern) {
  fs::path base = glob_base(pattern);
  Components components;
  bool below_base = false;
  for (const auto& component : fs::path(pattern)) {
    below_base = below_base || is_glob(component.string());
    if (below_base) components.push_back(component.string());
  }
  std::set<fs::path> found;
  expand(base, components, 0, found);
  return {found.begin(), found.end()};
}

namespace {

constexpr size_t kSampledFiles = 256;
constexpr int64_t kSampleBytes = 4096;

bool has_extension(const fs::path& path, const std::vector<std::string>& extensions) {
  std::string name = path.filename().string();
  return extensions.empty() || std::any_of(extensions.begin(), extensions.end(),
                                           [&](const auto& ending) { return name.ends_with(ending); });
}

// Collects files, and problems to report together.
class Listing {
 public:
  Listing(fs::path base, const std::vector<std::string>& extensions)
      : base_(std::move(base)), extensions_(extensions) {}

  void add(const fs::path& path) {
    if (!fs::is_directory(path)) return add_file(path);
    std::error_code error;
    auto walk =
        fs::recursive_directory_iterator(path, fs::directory_options::follow_directory_symlink, error);
    for (; !error && walk != fs::recursive_directory_iterator(); walk.increment(error)) {
      if (is_hidden(walk->path()))
        walk.disable_recursion_pending();
      else if (has_extension(walk->path(), extensions_) && !walk->is_directory())
        add_file(walk->path());
    }
    if (error) problems_.push_back(str("cannot list ", path.string(), ": ", error.message()));
  }

  std::vector<FileEntry> finish(const std::string& path) && {
    if (!problems_.empty()) throw ConfigError(problems_);
    if (files_.empty()) throw ConfigError(str("no files at '", path, "'", ending_with()));
    std::sort(files_.begin(), files_.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
    return std::move(files_);
  }

 private:
  void add_file(const fs::path& path) {
    struct stat status {};
    if (stat(path.c_str(), &status) != 0 || faccessat(AT_FDCWD, path.c_str(), R_OK, AT_EACCESS) != 0) {
      problems_.push_back(str("cannot read ", path.string(), ": ", std::strerror(errno)));
      return;
    }
    if (!S_ISREG(status.st_mode)) return;
    int64_t modified = int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
    files_.push_back({path, path.lexically_relative(base_).generic_string(), status.st_size, modified});
  }

  std::string ending_with() const {
    std::string list;
    for (const auto& extension : extensions_) list += (list.empty() ? " ending with " : ", ") + extension;
    return list;
  }

  fs::path base_;
  const std::vector<std::string>& extensions_;
  std::vector<FileEntry> files_;
  std::vector<std::string> problems_;
};

// A file descriptor for the length of a scope.
class OpenFile {
 public:
  explicit OpenFile(const fs::path& path) : descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    TITAN_CHECK(descriptor_ >= 0, "cannot read ", path.string(), ": ", std::strerror(errno));
  }
  ~OpenFile() { close(descriptor_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

}  // namespace

std::vector<FileEntry> list_files(const std::string& path, const std::vector<std::string>& extensions) {
  bool glob = is_glob(path) && !fs::exists(path);
  if (!glob && !fs::exists(path)) throw ConfigError(str("no files at '", path, "': it does not exist"));
  fs::path base = glob                     ? glob_base(path)
                  : fs::is_directory(path) ? fs::path(path)
                                           : fs::path(path).parent_path();
  Listing listing(base, extensions);
  if (!glob)
    listing.add(path);
  else
    for (const auto& match : expand_glob(path)) listing.add(match);
  return std::move(listing).finish(path);
}

uint64_t fingerprint_files(const std::vector<FileEntry>& files) {
  uint64_t hash = files.size();
  for (const auto& file : files) hash = hash_bytes(file.name, mix(hash ^ static_cast<uint64_t>(file.size)));
  // Reading everything would take as long as an epoch, and a changed file mostly changes its size.
  size_t stride = files.size() / kSampledFiles + 1;
  std::string sample;
  for (size_t i = 0; i < files.size(); i += stride) {
    int64_t count = std::min(kSampleBytes, files[i].size);
    for (int64_t begin : {int64_t{0}, (files[i].size - count) / 2, files[i].size - count}) {
      read_range(files[i], begin, count, sample);
      hash = hash_bytes(sample, hash);
    }
  }
  return hash;
}

void read_range(const FileEntry& file, int64_t begin, int64_t count, std::string& bytes) {
  OpenFile open_file(file.path);
  bytes.resize(count);
  for (int64_t done = 0; done < count;) {
    ssize_t got = pread(open_file.descriptor(), bytes.data() + done, count - done, begin + done);
    if (got < 0 && errno == EINTR) continue;
    TITAN_CHECK(got >= 0, "cannot read ", file.path.string(), ": ", std::strerror(errno));
    TITAN_CHECK(got > 0, file.path.string(), " has become shorter than the ", file.size,
                " bytes it had at the start");
    done += got;
  }
}

}  // namespace titan::data
