#include "launch_output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>

#include "titan/core/error.h"

namespace titan::cli {
namespace {

constexpr size_t kTailLines = 50;
constexpr size_t kLongestLine = 64 * 1024;  // without an end: shown in pieces, so that memory stays bounded

int parse_rank(std::string_view text, int num_ranks) {
  int rank = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || rank < 0 ||
      rank >= num_ranks) {
    throw ConfigError(
        str("--log-rank: '", text, "' isn't a rank of 0..", num_ranks - 1, ", 'all' or 'none'"));
  }
  return rank;
}

}  // namespace

ShownRanks::ShownRanks(const std::string& text, int num_ranks) : all_(text == "all") {
  if (all_ || text == "none") return;
  size_t start = 0;
  while (start <= text.size()) {
    const size_t comma = std::min(text.find(',', start), text.size());
    ranks_.insert(parse_rank(std::string_view(text).substr(start, comma - start), num_ranks));
    start = comma + 1;
  }
}

void Tail::add(std::string_view line) {
  if (lines_.size() == kTailLines) lines_.pop_front();
  lines_.emplace_back(line);
}

OutputPipe::OutputPipe(int fd, int target, int rank, Tail& tail)
    : fd_(fd), target_(target), tag_(str("[rank ", rank, "] ")), tail_(&tail) {
  fcntl(fd_, F_SETFL, O_NONBLOCK);
}

OutputPipe::OutputPipe(OutputPipe&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      target_(other.target_),
      tag_(std::move(other.tag_)),
      partial_(std::move(other.partial_)),
      tail_(other.tail_) {}

OutputPipe::~OutputPipe() {
  if (fd_ >= 0) finish();
}

void OutputPipe::drain() {
  char buffer[16 * 1024];
  while (fd_ >= 0) {
    const ssize_t n = read(fd_, buffer, sizeof(buffer));
    if (n > 0) {
      take({buffer, static_cast<size_t>(n)});
    } else if (n == 0) {
      finish();
    } else if (errno != EINTR) {
      return;  // EAGAIN: nothing more for now
    }
  }
}

void OutputPipe::take(std::string_view bytes) {
  std::string shown;
  partial_ += bytes;
  size_t start = 0;
  for (size_t end;
       (end = partial_.find('\n', start)) != std::string::npos || partial_.size() - start > kLongestLine;) {
    if (end == std::string::npos) end = start + kLongestLine;
    const auto line = std::string_view(partial_).substr(start, end - start);
    tail_->add(line);
    shown.append(tag_).append(line).append("\n");
    start = end + (partial_[end] == '\n');
  }
  partial_.erase(0, start);
  if (target_ >= 0 && !shown.empty()) write_all(target_, shown);
}

void OutputPipe::finish() {
  if (!partial_.empty()) take("\n");
  close(fd_);
  fd_ = -1;
}

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(fd, text.data(), text.size());
    if (n >= 0) {
      text.remove_prefix(static_cast<size_t>(n));
    } else if (errno == EAGAIN) {
      pollfd ready{fd, POLLOUT, 0};
      poll(&ready, 1, -1);
    } else if (errno != EINTR) {
      return;
    }
  }
}

}  // namespace titan::cli
