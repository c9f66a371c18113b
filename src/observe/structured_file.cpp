#include "observe/structured_file.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <system_error>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/version.h>
#include <nlohmann/json.hpp>

#include "core/process.h"
#include "dist/device_backend.h"
#include "titan/core/error.h"
#include "titan/dist/world.h"

namespace titan::train {

namespace {

template <class Number>
void append_number(std::string& text, Number value) {
  std::array<char, 32> digits{};
  text.append(digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr);
}

// With microseconds, as traces show them.
void append_milliseconds(std::string& text, double value) {
  std::array<char, 48> digits{};
  const auto end =
      std::to_chars(digits.data(), digits.data() + digits.size(), value, std::chars_format::fixed, 3);
  text.append(digits.data(), end.ptr);
}

// 2026-11-21T23:40:00.123456Z
void append_utc(std::string& text, int64_t wall_us) {
  const std::time_t seconds = wall_us / 1'000'000;
  std::tm parts = {};
  ::gmtime_r(&seconds, &parts);
  std::array<char, 48> digits{};
  const int length = std::snprintf(digits.data(), digits.size(), "%04d-%02d-%02dT%02d:%02d:%02d.%06dZ",
                                   parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday, parts.tm_hour,
                                   parts.tm_min, parts.tm_sec, static_cast<int>(wall_us % 1'000'000));
  text.append(digits.data(), static_cast<size_t>(length));
}

std::string_view suffix_of(EventKind kind) {
  static constexpr std::array<std::string_view, 4> suffixes = {"_start", "_end", "_error", ""};
  return suffixes[static_cast<size_t>(kind)];
}

void append_tags(std::string& text, uint8_t tags) {
  text += ", \"step_tags\": [";
  if (tags & kSavesTag) text += "\"checkpoint_save\"";
  if (tags & kValidatesTag) text += tags & kSavesTag ? ", \"eval\"" : "\"eval\"";
  text += ']';
}

// "model name : AMD EPYC 7B13". Only x86 has this line.
std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

std::string command_line() {
  std::ifstream file("/proc/self/cmdline");
  std::string words((std::istreambuf_iterator<char>(file)), {});
  if (!words.empty() && words.back() == '\0') words.pop_back();
  std::replace(words.begin(), words.end(), '\0', ' ');
  return words;
}

std::string device_text(at::Device device) {
  auto* backend = dist::device_backend();
  if (!backend || device.type() != backend->device_type()) return device.str();
  return device.str() + " " + backend->device_name(device.index());
}

std::string kernel_text() {
  utsname name = {};
  ::uname(&name);
  return std::string(name.sysname) + " " + name.release + " " + name.machine;
}

}  // namespace

int64_t steady_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

EventLines::EventLines(int rank, int local_rank)
    : process_start_ns_(steady_now_ns()), previous_ns_(process_start_ns_) {
  identity_ = str(", \"rank\": ", rank, ", \"local_rank\": ", local_rank,
                  ", \"host_name\": ", nlohmann::json(host_name()).dump(), ", \"pid\": ", ::getpid(),
                  ", \"task_name\": \"train\"");
  set_clock();
}

void EventLines::set_clock() {
  const auto wall = std::chrono::system_clock::now().time_since_epoch();
  offset_ns_ = std::chrono::duration_cast<std::chrono::nanoseconds>(wall).count() - steady_now_ns();
}

void EventLines::append_head(std::string& text, int64_t steady_ns, const char* type) {
  const int64_t wall_us = (steady_ns + offset_ns_) / 1000;
  text += "{\"seq_id\": ";
  append_number(text, sequence_++);
  text += ", \"time\": \"";
  append_utc(text, wall_us);
  text += "\", \"time_ms\": ";
  append_number(text, wall_us / 1000);
  text += ", \"time_us\": ";
  append_number(text, wall_us);
  text += ", \"log_type\": \"";
  text += type;
  text += '"';
}

std::string EventLines::process_line(const std::string& environment) {
  std::string text;
  append_head(text, process_start_ns_, "instant");
  return text + R"(, "log_type_name": "process", "value": null, "step": 0, "relative_step": 0)" + identity_ +
         ", \"environment\": " + environment + "}\n";
}

void EventLines::append(std::string& text, const StructuredEvent& event) {
  append_head(text, event.steady_ns, event.kind == EventKind::Instant ? "instant" : "event");
  text += ", \"log_type_name\": \"";
  text += event.name;
  text += suffix_of(event.kind);
  text += "\", \"value\": ";
  if (!std::isfinite(event.value))
    text += "null";
  else if (event.kind == EventKind::Instant)
    append_number(text, event.value);
  else
    append_milliseconds(text, event.value);
  text += ", \"delta_ms\": ";
  append_milliseconds(text, std::max(0.0, static_cast<double>(event.steady_ns - previous_ns_) * 1e-6));
  previous_ns_ = event.steady_ns;
  text += ", \"step\": ";
  append_number(text, event.step);
  text += ", \"relative_step\": ";
  append_number(text, event.relative_step);
  append_tags(text, event.step_tags);
  text += identity_;
  text += ", \"tid\": ";
  append_number(text, static_cast<int64_t>(event.thread));
  text += ", \"caller\": \"";
  text += event.caller;
  text += "\"}\n";
}

std::string process_environment_json(const dist::World& world, at::Device device) {
  const nlohmann::ordered_json object = {{"titan", kVersion},
                                         {"libtorch", TORCH_VERSION},
                                         {"compiler", __VERSION__},
                                         {"host", host_name()},
                                         {"kernel", kernel_text()},
                                         {"cpu", cpu_name()},
                                         {"cores", std::thread::hardware_concurrency()},
                                         {"machine_memory_gib", machine_memory_gib()},
                                         {"device", device_text(device)},
                                         {"world_size", world.size()},
                                         {"local_size", world.local_size()},
                                         {"backend", world.backend()},
                                         {"launched_by", world.launched_by()},
                                         {"threads", at::get_num_threads()},
                                         {"command", command_line()}};
  // A command line may hold bytes that aren't UTF-8.
  return object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

void StructuredFile::open(const std::string& head) {
  const auto current = path(".jsonl");
  if (file_) {
    file_.reset();
    std::error_code error;
    std::filesystem::rename(current, path(".earlier.jsonl"), error);
    TITAN_CHECK(!error, "cannot rename ", current.string(), ": ", error.message());
  }
  file_ = std::make_unique<AppendFile>(current, /*truncate=*/true);
  written_ = 0;
  append(head);
}

void StructuredFile::reopen(const std::string& head) {
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
