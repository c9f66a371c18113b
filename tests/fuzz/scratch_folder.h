#pragma once

// A folder in memory for parsers that read a file by its path.

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace titan::fuzz {

/// Named after the process: two fuzzers may run at the same time. Removed at exit.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::string pattern = "/dev/shm/titan_fuzz_XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) std::abort();
    folder_ = pattern;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  /// The path of a file with these bytes.
  std::filesystem::path write(const std::string& name, std::string_view bytes) const {
    const std::filesystem::path path = folder_ / name;
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!file.flush()) std::abort();
    return path;
  }

 private:
  std::filesystem::path folder_;
};

}  // namespace titan::fuzz
