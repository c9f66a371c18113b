#include "train/structured_file.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <map>
#include <random>
#include <system_error>
#include <vector>

#include "titan/core/error.h"

namespace titan::train {

void StructuredFile::open(const std::string& head) {
  const auto current = path(".jsonl");
  if (file_) {
    file_.reset();
    std::error_code error;
    std::filesystem::rename(current, path(".earlier.jsonl"), error);
    TITAN_CHECK(!error, "can't rename ", current.string(), ": ", error.message());
  }
  file_ = std::make_unique<AppendFile>(current, /*truncate=*/true);
  written_ = 0;
  append(head);
}

void StructuredFile::go_on(const std::string& head) {
  const auto current = path(".jsonl");
  file_ = std::make_unique<AppendFile>(current, /*truncate=*/false);
  std::error_code error;
  const auto size = std::filesystem::file_size(current, error);
  written_ = error ? 0 : static_cast<int64_t>(size);
  append(written_ > 0 ? "\n" + head : head);
}

void StructuredFile::append(const std::string& lines) {
  file_->append(lines);
  written_ += static_cast<int64_t>(lines.size());
}

void remove_old_logs(const std::filesystem::path& folder, int rank, size_t kept) {
  const std::string prefix = str("train.global_rank_", rank, ".");
  std::map<std::string, std::vector<std::filesystem::path>> processes;  // by stem, which sorts by time
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    if (name.starts_with(prefix) && name.ends_with(".jsonl"))
      processes[name.substr(0, name.find('.', prefix.size()))].push_back(entry.path());
  }
  while (processes.size() > kept) {
    for (const auto& file : processes.begin()->second) std::filesystem::remove(file, error);
    processes.erase(processes.begin());
  }
}

std::string structured_stem(int rank) {
  using std::chrono::duration_cast, std::chrono::microseconds;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const int64_t now_us = duration_cast<microseconds>(now).count();
  const std::time_t seconds = now_us / 1'000'000;
  std::tm utc = {};
  ::gmtime_r(&seconds, &utc);
  std::array<char, 32> time{};
  std::strftime(time.data(), time.size(), "%Y%m%d-%H%M%S", &utc);
  std::array<char, 16> fraction{};
  std::snprintf(fraction.data(), fraction.size(), "%06d", static_cast<int>(now_us % 1'000'000));
  constexpr char kAlphabet[] = "abcdefghijklmnopqrstuvwxyz0123456789";
  std::random_device random;
  std::string unique;
  for (int i = 0; i < 6; ++i) unique += kAlphabet[random() % (sizeof kAlphabet - 1)];
  return str("train.global_rank_", rank, ".", time.data(), "-", fraction.data(), "-", unique);
}

}  // namespace titan::train
