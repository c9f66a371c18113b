#include "append_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <sstream>

#include "titan/core/error.h"
#include "titan/core/file.h"

namespace titan::train {

AppendFile::AppendFile(std::filesystem::path path, bool truncate) : path_(std::move(path)) {
  make_folder(path_.parent_path());
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (truncate ? O_TRUNC : 0), 0644);
  if (file_ < 0) fail("open");
}

AppendFile::~AppendFile() {
  if (file_ >= 0) ::close(file_);
}

void AppendFile::append(std::string_view bytes) {
  while (!bytes.empty()) {
    ssize_t written = ::write(file_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write to");
    bytes.remove_prefix(static_cast<size_t>(written));
  }
}

void AppendFile::sync() {
  if (::fsync(file_) != 0 && errno != EINVAL && errno != EROFS) fail("sync");
}

void AppendFile::fail(const char* operation) const {
  throw Error(str("can't ", operation, " the log ", path_.string(), ": ", std::strerror(errno)));
}

void keep_rows_up_to(int64_t step, const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return;
  std::istringstream lines(read_file(path));
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    const bool is_whole = !lines.eof();  // a killed run may leave half a row
    const auto row = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool has_step = row.is_object() && row.contains("step") && row["step"].is_number_integer();
    if (is_whole && has_step && row["step"].get<int64_t>() <= step) kept += line + "\n";
  }
  write_file_atomic(path, kept);
}

}  // namespace titan::train
