#include "text_source.h"

#include <link.h>

#include "hash.h"
#include "titan/core/error.h"

namespace titan::data {
namespace {

namespace fs = std::filesystem;

// Stops at the loaded library whose name is libtorch_cpu.so.
int find_torch(dl_phdr_info* library, size_t, void* result) {
  fs::path path = library->dlpi_name;
  if (path.filename() != "libtorch_cpu.so") return 0;
  *static_cast<fs::path*>(result) = path;
  return 1;
}

}  // namespace

TextSource::TextSource(std::vector<FileEntry> files) : files_(std::move(files)) {
  int64_t bytes = 0;
  for (const auto& file : files_) bytes += file.size;
  fingerprint_ = str("text:", files_.size(), " files:", bytes, " bytes:", hex(fingerprint_files(files_)));
}

void TextSource::read(int64_t i, int64_t begin, int64_t count, std::string& text) const {
  read_range(files_[i], begin, count, text);
}

fs::path torch_headers() {
  fs::path library;
  dl_iterate_phdr(find_torch, &library);
  fs::path headers = library.parent_path().parent_path() / "include";
  if (library.empty() || !fs::is_directory(headers))
    throw ConfigError(str("data set 'cpp_headers': no headers beside the loaded LibTorch (looked for '",
                          headers.string(), "'); set training.dataset_path to a folder of C++ headers"));
  return headers;
}

}  // namespace titan::data
