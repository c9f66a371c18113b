#pragma once

// A terminal with the features that a program that paints on it needs.

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>
#include <utmp.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace titan::testing {

/// The text on the terminal. Knows the control sequences that titan uses, and throws on any other, for
/// instance a mode that a program sets and doesn't reset.
class Screen {
 public:
  Screen(size_t rows, size_t columns) : rows_(rows, std::string(columns, ' ')) {}

  void write(const std::string& bytes) {
    pending_ += bytes;
    while (const size_t used = take()) pending_.erase(0, used);
  }

  /// Without blanks at the ends of lines and of the screen.
  std::string text() const {
    std::string text;
    for (const std::string& row : rows_) text += row.substr(0, row.find_last_not_of(' ') + 1) + "\n";
    return text.substr(0, text.find_last_not_of('\n') + 1);
  }
  bool is_whole() const { return is_whole_; }  ///< the sequence that began last is complete
  bool is_plain() const { return is_plain_; }  ///< text written next has no color
  size_t column() const { return column_; }    ///< where text written next goes
  size_t num_scrolled() const { return num_scrolled_; }

 private:
  // Takes one character or sequence of the pending text. Returns its length; 0 if it isn't complete yet.
  size_t take() {
    if (pending_.empty()) return 0;
    const char c = pending_.front();
    if (c != '\033') {
      put(c);
      return 1;
    }
    const size_t end = pending_.find_first_not_of("[?;0123456789", 1);
    if (end == std::string::npos) return 0;
    control(pending_.substr(1, end));
    return end + 1;
  }

  void put(char c) {
    if (c == '\r') {
      column_ = 0;
    } else if (c == '\n') {
      next_row();
    } else {
      if (column_ == width()) {
        column_ = 0;
        next_row();
      }
      rows_[row_][column_++] = c;
    }
  }
  void next_row() {
    if (++row_ < rows_.size()) return;
    std::rotate(rows_.begin(), rows_.begin() + 1, rows_.end());
    rows_.back().assign(width(), ' ');
    --row_;
    ++num_scrolled_;
  }
  size_t width() const { return rows_.front().size(); }

  void control(const std::string& sequence) {
    if (sequence == "[H") {
      row_ = column_ = 0;
      is_whole_ = false;
    } else if (sequence == "[2J") {
      for (std::string& row : rows_) row.assign(row.size(), ' ');
    } else if (sequence == "[J") {
      erase(row_, column_);
      for (size_t row = row_ + 1; row < rows_.size(); ++row) erase(row, 0);
      is_whole_ = true;
    } else if (sequence == "[K" || sequence == "[2K") {
      erase(row_, sequence == "[K" ? column_ : 0);
    } else if (sequence.back() == 'm') {
      is_plain_ = sequence == "[0m";
    } else {
      throw std::runtime_error("a control sequence that this terminal doesn't know: ESC " + sequence);
    }
  }
  void erase(size_t row, size_t from) {
    std::fill(rows_[row].begin() + static_cast<long>(std::min(from, width())), rows_[row].end(), ' ');
  }

  std::vector<std::string> rows_;
  size_t row_ = 0, column_ = 0, num_scrolled_ = 0;
  bool is_whole_ = false, is_plain_ = true;
  std::string pending_;
};

/// A program on a terminal of its own.
class TerminalCommand {
 public:
  TerminalCommand(const std::vector<std::string>& words, size_t rows, size_t columns)
      : screen_(rows, columns) {
    const winsize size{static_cast<unsigned short>(rows), static_cast<unsigned short>(columns), 0, 0};
    std::vector<char*> arguments;
    for (const auto& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    int other_end = -1;
    if (::openpty(&terminal_, &other_end, nullptr, nullptr, &size) != 0) throw std::runtime_error("openpty");
    ::fcntl(terminal_, F_SETFD, FD_CLOEXEC);  // or programs that are started after this one keep it open
    ::tcgetattr(terminal_, &before_);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(terminal_);
      ::login_tty(other_end);
      ::execvp(arguments[0], arguments.data());
      ::_exit(127);
    }
    ::close(other_end);
  }
  TerminalCommand(const TerminalCommand&) = delete;
  ~TerminalCommand() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    ::close(terminal_);
  }

  void type(const std::string& keys) const {
    if (::write(terminal_, keys.data(), keys.size()) < 0) throw std::runtime_error("write to the terminal");
  }

  int pid() const { return pid_; }

  /// Everything painted so far.
  const Screen& screen() {
    read();
    return screen_;
  }
  const std::string& bytes() const { return bytes_; }
  /// The terminal is in its original mode.
  bool is_as_before() const {
    termios now{};
    ::tcgetattr(terminal_, &now);
    return std::memcmp(&now, &before_, sizeof(now)) == 0;
  }

  /// Waits for its end: its exit code, or 128 + signal.
  bool has_ended() {
    int status = 0;
    if (pid_ < 0 || ::waitpid(pid_, &status, WNOHANG) != pid_) return pid_ < 0;
    pid_ = -1;
    read();
    status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return true;
  }
  int status() const { return status_; }

 private:
  void read() {
    char buffer[4096];
    for (pollfd ready{terminal_, POLLIN, 0}; ::poll(&ready, 1, 0) > 0;) {
      const ssize_t count = ::read(terminal_, buffer, sizeof(buffer));
      if (count <= 0) return;  // EIO: nobody is at the other end any more
      bytes_.append(buffer, static_cast<size_t>(count));
      screen_.write({buffer, static_cast<size_t>(count)});
    }
  }

  int terminal_ = -1, pid_ = -1, status_ = -1;
  termios before_{};
  Screen screen_;
  std::string bytes_;
};

}  // namespace titan::testing
