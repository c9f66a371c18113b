#include "e2e/command.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

namespace titan::testing {
namespace {

using Clock = std::chrono::steady_clock;

std::filesystem::path make_folder() {
  std::string path = (std::filesystem::temp_directory_path() / "titan_test_XXXXXX").string();
  if (!mkdtemp(path.data())) throw std::runtime_error("mkdtemp: " + path);
  return path;
}

void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }

bool is_free(int port) {
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in everywhere{};
  everywhere.sin_family = AF_INET;
  everywhere.sin_port = htons(static_cast<uint16_t>(port));
  const bool is_free = ::bind(listener, reinterpret_cast<sockaddr*>(&everywhere), sizeof everywhere) == 0;
  ::close(listener);
  return is_free;
}

// Below the ports that the system hands out on request, as it does to the tests that run beside this one.
int find_port() {
  const int first = 10000 + getpid() * 7 % 20000;
  for (int port = first; port < first + 1000; ++port)
    if (is_free(port)) return port;
  throw std::runtime_error("no free port from " + std::to_string(first) + " on");
}

}  // namespace

TempFolder::TempFolder() : path(make_folder()) {}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

MachineLag::MachineLag() {
  thread_ = std::jthread([this](const std::stop_token& stop) {
    constexpr std::chrono::milliseconds kTurn(10);
    while (!stop.stop_requested()) {
      const auto start = Clock::now();
      std::this_thread::sleep_for(kTurn);
      seconds_ = seconds_ + std::chrono::duration<double>(Clock::now() - start - kTurn).count();
    }
  });
}

std::string text_of(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

std::string some_port() {
  static const int port = find_port();
  return std::to_string(port);
}

Command::Command(const std::vector<std::string>& words, const Variables& variables) : folder_(make_folder()) {
  const std::string out = folder_ / "out", err = folder_ / "err";
  std::vector<char*> arguments;
  for (const auto& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  pid_ = fork();
  if (pid_ != 0) return;
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a time limit may end this program only
  for (const auto& [name, value] : variables) {
    value.empty() ? unsetenv(name.c_str()) : setenv(name.c_str(), value.c_str(), 1);
  }
  dup2(open(out.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600), STDOUT_FILENO);
  dup2(open(err.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600), STDERR_FILENO);
  execvp(arguments[0], arguments.data());
  perror(arguments[0]);
  _exit(127);
}

Command::Command(Command&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      folder_(std::exchange(other.folder_, {})),
      started_(other.started_) {}

Command::~Command() {
  if (pid_ > 0) {
    kill(-pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::error_code ignored;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
}

void Command::signal(int number) const { kill(pid_, number); }

std::string Command::output() const { return text_of(folder_ / "out"); }

bool Command::wait_for_output(const std::string& text, double limit_s) const {
  const auto start = Clock::now();
  while (output().find(text) == std::string::npos) {
    if (seconds_since(start) > limit_s) return false;
    pause();
  }
  return true;
}

bool Command::wait_for_errors(const std::string& text, double limit_s) const {
  const auto start = Clock::now();
  while (text_of(folder_ / "err").find(text) == std::string::npos) {
    if (seconds_since(start) > limit_s) return false;
    pause();
  }
  return true;
}

CommandResult Command::wait(double limit_s) {
  const auto start = Clock::now();
  int status = 0;
  while (waitpid(pid_, &status, WNOHANG) == 0) {
    if (seconds_since(start) > limit_s) kill(-pid_, SIGKILL);
    pause();
  }
  pid_ = -1;
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), text_of(folder_ / "out"),
          text_of(folder_ / "err"), seconds_since(started_)};
}

CommandResult run(const std::vector<std::string>& words, const Command::Variables& variables,
                  double limit_s) {
  return Command(words, variables).wait(limit_s);
}

}  // namespace titan::testing
