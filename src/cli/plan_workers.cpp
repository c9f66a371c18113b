#include "cli/plan_workers.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "titan/core/error.h"

namespace titan::cli {

namespace {

using nlohmann::json;
using train::PlanAnswer;
using train::PlanRequest;

constexpr const char* kNoWorker = "a process that plans can't be started: ";
constexpr const char* kEnded = "the process that planned it ended";

// ---- a message is a line of JSON

bool write_line(int file, const json& message) {
  const std::string line = message.dump() + "\n";
  for (size_t done = 0; done < line.size();) {
    const ssize_t count = ::write(file, line.data() + done, line.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    done += static_cast<size_t>(count);
  }
  return true;
}

std::optional<json> read_line(int file) {
  std::string line;
  char c = 0;
  while (true) {
    const ssize_t count = ::read(file, &c, 1);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return std::nullopt;
    if (c == '\n') return json::parse(line);
    line.push_back(c);
  }
}

json to_json(const PlanRequest& request) {
  json settings = json::array();
  for (const train::Layout::Setting& setting : request.settings)
    settings.push_back({setting.section, setting.key, setting.value});
  return {{"world", request.world},
          {"settings", settings},
          {"only_first_rank", request.only_first_rank},
          {"stops_above", request.stops_above}};
}

PlanRequest request_of(const json& message) {
  PlanRequest request{.settings = {},
                      .world = message["world"],
                      .only_first_rank = message["only_first_rank"],
                      .stops_above = message["stops_above"]};
  for (const json& setting : message["settings"])
    request.settings.push_back({setting[0], setting[1], setting[2]});
  return request;
}

json to_json(const PlanAnswer& answer) {
  return {{"error", answer.error},
          {"has_failed", answer.has_failed},
          {"planning_s", answer.planning_s},
          {"share_rehearsed", answer.share_rehearsed},
          {"step_s", answer.step_s},
          {"tokens", answer.tokens},
          {"mfu", answer.mfu},
          {"parameters", answer.parameters},
          {"peak_bytes", answer.peak_bytes},
          {"needed_bytes", answer.needed_bytes},
          {"seconds", answer.seconds},
          {"most_bytes", answer.most_bytes},
          {"saved_bytes", answer.saved_bytes}};
}

PlanAnswer answer_of(const json& message) {
  return {.error = message["error"],
          .has_failed = message["has_failed"],
          .planning_s = message["planning_s"],
          .share_rehearsed = message["share_rehearsed"],
          .step_s = message["step_s"],
          .tokens = message["tokens"],
          .mfu = message["mfu"],
          .parameters = message["parameters"],
          .peak_bytes = message["peak_bytes"],
          .needed_bytes = message["needed_bytes"],
          .most_bytes = message["most_bytes"],
          .saved_bytes = message["saved_bytes"],
          .seconds = message["seconds"]};
}

/// Its ends are closed with it, unless somebody keeps them.
struct LinePipe {
  LinePipe() { TITAN_CHECK(::pipe2(ends, O_CLOEXEC) == 0, kNoWorker, std::strerror(errno)); }
  ~LinePipe() {
    for (const int end : ends)
      if (end >= 0) ::close(end);
  }
  LinePipe(const LinePipe&) = delete;
  LinePipe& operator=(const LinePipe&) = delete;

  int keep(int end) { return std::exchange(ends[end], -1); }

  int ends[2] = {-1, -1};  // to read from, to write to
};

[[noreturn]] void serve(int requests, int answers, pid_t parent,
                        const std::function<PlanWorkers::Answer()>& open) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);     // a search that is interrupted leaves nobody behind
  if (::getppid() != parent) ::_exit(1);  // it was before the line above
  try {
    const PlanWorkers::Answer answer = open();
    while (const auto message = read_line(requests))
      if (!write_line(answers, to_json(answer(request_of(*message))))) break;
  } catch (const std::exception& error) {
    write_line(answers, to_json(PlanAnswer{.error = error.what(), .has_failed = true}));
  }
  ::_exit(0);
}

}  // namespace

PlanWorkers::PlanWorkers() : previous_(std::signal(SIGPIPE, SIG_IGN)) {}

// Delegates, so that the destructor ends the first workers if a later one can't be started.
PlanWorkers::PlanWorkers(int count, const std::function<Answer()>& open) : PlanWorkers() {
  const pid_t parent = ::getpid();
  for (int i = 0; i < count; ++i) {
    LinePipe requests, answers;
    const pid_t process = ::fork();
    TITAN_CHECK(process >= 0, kNoWorker, std::strerror(errno));
    if (process == 0) {
      for (const Worker& other : workers_) {
        ::close(other.requests);
        ::close(other.answers);
      }
      ::close(requests.ends[1]);
      ::close(answers.ends[0]);
      serve(requests.ends[0], answers.ends[1], parent, open);
    }
    workers_.push_back({process, requests.keep(1), answers.keep(0)});
  }
}

PlanWorkers::~PlanWorkers() {
  for (const Worker& worker : workers_) {
    ::close(worker.requests);
    ::close(worker.answers);
  }
  for (const Worker& worker : workers_) ::waitpid(worker.process, nullptr, 0);
  std::signal(SIGPIPE, previous_);
}

void PlanWorkers::plan(const train::NextRequest& next, const train::TakeAnswer& take) {
  std::vector<std::optional<size_t>> busy_with(workers_.size());
  std::vector<bool> has_ended(workers_.size(), false);
  size_t num_asked = 0;
  const auto is_busy = [](const std::optional<size_t>& number) { return number.has_value(); };
  // Whoever is free gets the next request.
  const auto give = [&] {
    for (size_t w = 0; w < workers_.size(); ++w) {
      if (busy_with[w] || has_ended[w]) continue;
      const std::optional<PlanRequest> request = next();
      if (!request) return;
      busy_with[w] = num_asked++;
      if (write_line(workers_[w].requests, to_json(*request))) continue;
      has_ended[w] = true;
      take(*std::exchange(busy_with[w], std::nullopt), {.error = kEnded, .has_failed = true});
    }
  };
  give();
  while (std::ranges::any_of(busy_with, is_busy)) {
    std::vector<pollfd> waiting;
    for (size_t w = 0; w < workers_.size(); ++w)
      waiting.push_back({.fd = busy_with[w] ? workers_[w].answers : -1, .events = POLLIN, .revents = 0});
    if (::poll(waiting.data(), waiting.size(), -1) < 0) continue;
    for (size_t w = 0; w < workers_.size(); ++w) {
      if (waiting[w].revents == 0) continue;
      const auto message = read_line(workers_[w].answers);
      has_ended[w] = !message;
      take(*std::exchange(busy_with[w], std::nullopt),
           message ? answer_of(*message) : PlanAnswer{.error = kEnded, .has_failed = true});
    }
    give();
  }
  if (std::ranges::find(has_ended, false) != has_ended.end()) return;
  while (next()) take(num_asked++, {.error = "all processes that plan have ended", .has_failed = true});
}

}  // namespace titan::cli
