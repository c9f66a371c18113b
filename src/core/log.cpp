#include "titan/core/log.h"

// The only file that includes spdlog, whose headers take two seconds to compile.
#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <memory>
#include <mutex>
#include <string>

namespace titan::log {
namespace {

struct LevelForm {
  spdlog::level::level_enum level;
  std::string_view color;
};
// By Level, whose order is spdlog's.
constexpr std::array<LevelForm, 4> kLevels = {{{spdlog::level::debug, "\033[36m"},
                                               {spdlog::level::info, "\033[32m"},
                                               {spdlog::level::warn, "\033[33m"},
                                               {spdlog::level::err, "\033[31m"}}};

spdlog::level::level_enum level_of(Level level) { return kLevels[static_cast<size_t>(level)].level; }
std::string_view color_of(spdlog::level::level_enum level) {
  return kLevels[static_cast<size_t>(level - spdlog::level::debug)].color;
}

void write_all(std::string_view text) {
  while (!text.empty()) {
    ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    text.remove_prefix(static_cast<size_t>(written));
  }
}

/// Writes each line at once. spdlog's color sink writes it in pieces, which mix with other ranks' lines.
class LineSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  void set_color(bool color) {
    std::lock_guard lock(mutex_);
    color_ = color;
  }

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t formatted;
    formatter_->format(message, formatted);
    std::string line(formatted.data(), formatted.size());
    if (color_ && message.color_range_end > message.color_range_start) {
      line.insert(message.color_range_end, "\033[0m");
      line.insert(message.color_range_start, color_of(message.level));
    }
    write_all(line);
  }
  void flush_() override {}

  bool color_ = false;
};

class Log {
 public:
  Log() { configure(Settings{}); }

  void configure(const Settings& settings) {
    std::lock_guard lock(mutex_);
    settings_ = settings;
    std::string rank;
    if (settings.rank >= 0 && settings.world_size > 1) rank = "[rank " + std::to_string(settings.rank) + "] ";
    sink_->set_pattern("[titan] %Y-%m-%d %H:%M:%S.%e - " + rank + "%^%l%$ - %v");
    sink_->set_color(settings.color);
    logger_.set_level(level_of(settings.level));
  }

  Settings settings() {
    std::lock_guard lock(mutex_);
    return settings_;
  }

  void write(Level level, std::string_view message) {
    logger_.log(level_of(level), spdlog::string_view_t(message.data(), message.size()));
  }

 private:
  std::mutex mutex_;
  Settings settings_;
  std::shared_ptr<LineSink> sink_ = std::make_shared<LineSink>();
  spdlog::logger logger_{"titan", sink_};
};

/// Never destroyed, because threads and destructors may log until the process ends.
Log& the_log() {
  static Log& log = *new Log;
  return log;
}

bool on_rank0() { return the_log().settings().rank <= 0; }

}  // namespace

void configure(const Settings& settings) { the_log().configure(settings); }
Settings settings() { return the_log().settings(); }

void debug(std::string_view message) { the_log().write(Level::Debug, message); }
void info(std::string_view message) { the_log().write(Level::Info, message); }
void warning(std::string_view message) { the_log().write(Level::Warning, message); }
void error(std::string_view message) { the_log().write(Level::Error, message); }

void info_rank0(std::string_view message) {
  if (on_rank0()) info(message);
}
void warning_rank0(std::string_view message) {
  if (on_rank0()) warning(message);
}

}  // namespace titan::log
