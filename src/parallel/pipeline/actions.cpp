#include "parallel/pipeline/actions.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <ostream>
#include <string_view>
#include <utility>

#include "core/file.h"
#include "titan/core/error.h"

namespace titan::pipeline {

namespace {

using Kind = Action::Kind;

// TorchTitan's and PyTorch's notation for actions: stage, word, micro-batch, as in 3F7.
constexpr std::array<std::string_view, kNumKinds> kWords = {
    "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"};

// Removes a number from the front; digits only, no sign.
std::optional<int> take_number(std::string_view& text) {
  if (text.empty() || text.front() < '0' || text.front() > '9') return std::nullopt;
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(end - text.data());
  return number;
}

// Parses one action; returns nothing for any other text.
std::optional<Action> parse_action(std::string_view text) {
  const std::optional<int> stage = take_number(text);
  if (!stage) return std::nullopt;
  const size_t length = std::min(text.find_first_of("0123456789"), text.size());
  const auto word = std::find(kWords.begin(), kWords.end(), text.substr(0, length));
  if (word == kWords.end()) return std::nullopt;
  const auto kind = static_cast<Kind>(word - kWords.begin());
  text.remove_prefix(length);
  if (is_parameter_action(kind)) return text.empty() ? std::optional(Action{kind, *stage, -1}) : std::nullopt;
  const std::optional<int> micro_batch = take_number(text);
  if (!micro_batch || !text.empty()) return std::nullopt;
  return Action{kind, *stage, *micro_batch};
}

constexpr int kMostOfAKind = 1 << 20;  // stages, micro-batches
constexpr size_t kMostProblems = 20;
constexpr std::string_view kBlank = " \t\r";
constexpr std::string_view kOverlapEnd = ")OVERLAP_F_B";

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

/// "(0F3;1B2)OVERLAP_F_B": the F and the B.
std::optional<std::vector<Action>> parse_overlap(std::string_view cell) {
  if (!cell.starts_with('(') || !cell.ends_with(kOverlapEnd)) return std::nullopt;
  const std::string_view pair = cell.substr(1, cell.size() - 1 - kOverlapEnd.size());
  const size_t middle = pair.find(';');
  if (middle == std::string_view::npos) return std::nullopt;
  const auto first = parse_action(trimmed(pair.substr(0, middle)));
  const auto second = parse_action(trimmed(pair.substr(middle + 1)));
  if (!first || first->kind != Action::Kind::Forward) return std::nullopt;
  if (!second || second->kind != Action::Kind::Backward) return std::nullopt;
  return std::vector<Action>{*first, *second};
}

std::optional<std::vector<Action>> parse_cell(std::string_view cell) {
  if (cell.empty()) return std::vector<Action>{};
  if (cell.starts_with('(')) return parse_overlap(cell);
  if (const auto action = parse_action(cell)) return std::vector<Action>{*action};
  return std::nullopt;
}

class Reader {
 public:
  explicit Reader(const std::filesystem::path& file) : file_(file) { schedule_.name = file.stem().string(); }

  Schedule read(std::string_view text) {
    // Line ends and empty lines after the last row don't begin a rank.
    const size_t last = text.find_last_not_of(" \t\r\n");
    text = text.substr(0, last == std::string_view::npos ? 0 : last + 1);
    schedule_.rank_of_stage.clear();
    while (!text.empty()) read_row(take(text, '\n'));
    if (schedule_.ranks.empty()) problem(1, 1, "no actions");
    finish();
    return std::move(schedule_);
  }

 private:
  static std::string_view take(std::string_view& text, char end) {
    const size_t length = std::min(text.find(end), text.size());
    const std::string_view part = text.substr(0, length);
    text.remove_prefix(std::min(length + 1, text.size()));
    return part;
  }

  template <class... Args>
  void problem(size_t line, size_t column, const Args&... args) {
    if (problems_.size() < kMostProblems)
      problems_.push_back(str(file_.string(), ":", line, ":", column, ": ", args...));
  }

  void read_row(std::string_view row) {
    schedule_.ranks.emplace_back();
    const char* const begin = row.data();
    while (!row.empty()) {
      const std::string_view whole = take(row, ','), cell = trimmed(whole);
      read_cell(cell, (cell.empty() ? whole : cell).data() - begin + 1);
    }
    if (schedule_.ranks.back().empty() && problems_.empty())
      problem(schedule_.ranks.size(), 1, "rank ", schedule_.ranks.size() - 1, " has no actions");
  }

  void read_cell(std::string_view cell, size_t column) {
    const size_t line = schedule_.ranks.size();
    const auto actions = parse_cell(cell);
    if (!actions)
      return problem(line, column, "'", cell,
                     "' is no action: write a stage, one of F, B, I, W, SEND_F, RECV_F, SEND_B, "
                     "RECV_B and a micro-batch, as in 0F3; a stage and UNSHARD, RESHARD or REDUCE_GRAD; or "
                     "(0F3;1B2)OVERLAP_F_B");
    for (const Action& action : *actions) add(action, column);
  }

  void add(const Action& action, size_t column) {
    const int rank = static_cast<int>(schedule_.ranks.size()) - 1;
    if (action.stage >= kMostOfAKind || action.micro_batch >= kMostOfAKind)
      return problem(rank + 1, column, "'", action, "': stages and micro-batches go up to ",
                     kMostOfAKind - 1);
    std::vector<int>& map = schedule_.rank_of_stage;
    if (action.stage >= static_cast<int>(map.size())) map.resize(action.stage + 1, -1);
    if (map[action.stage] == -1) map[action.stage] = rank;
    if (map[action.stage] != rank)
      return problem(rank + 1, column, "'", action, "' is on rank ", rank, ", but stage ", action.stage,
                     " is on rank ", map[action.stage], " (line ", map[action.stage] + 1, ")");
    schedule_.num_micro_batches = std::max(schedule_.num_micro_batches, action.micro_batch + 1);
    schedule_.ranks.back().push_back(action);
  }

  void finish() {
    schedule_.num_stages = static_cast<int>(schedule_.rank_of_stage.size());
    if (problems_.empty())
      for (int stage = 0; stage < schedule_.num_stages; ++stage)
        if (schedule_.rank_of_stage[stage] == -1)
          problem(1, 1, "stage ", stage, " has no action; the stages are 0 to ", schedule_.num_stages - 1);
    if (!problems_.empty()) throw ConfigError(problems_);
  }

  std::filesystem::path file_;
  Schedule schedule_;
  std::vector<std::string> problems_;
};

bool makes_input_gradient(Kind kind) { return kind == Kind::Backward || kind == Kind::BackwardInput; }

bool is_stage(const Schedule& schedule, int stage) { return stage >= 0 && stage < schedule.num_stages; }

bool same_rank(const Schedule& schedule, int a, int b) {
  return schedule.rank_of_stage[a] == schedule.rank_of_stage[b];
}

}  // namespace

std::string to_string(const Action& action) { return str(action); }

std::ostream& operator<<(std::ostream& out, const Action& action) {
  const auto kind = static_cast<size_t>(action.kind);
  out << action.stage << (kind < kWords.size() ? kWords[kind] : "?");
  if (!is_parameter_action(action.kind)) out << action.micro_batch;
  return out;
}

bool has_backward(const Schedule& schedule) {
  return any_kind(schedule, [](Kind kind) { return is_compute(kind) && kind != Kind::Forward; });
}

bool has_communication(const Schedule& schedule) { return any_kind(schedule, is_communication); }

std::optional<int> source_stage(const Schedule& schedule, const Action& action) {
  int source = -1;
  if (action.kind == Kind::Forward) source = action.stage - 1;
  if (makes_input_gradient(action.kind)) source = action.stage + 1;
  return is_stage(schedule, source) ? std::optional(source) : std::nullopt;
}

std::optional<Action> receive_for(const Schedule& schedule, const Action& compute) {
  const std::optional<int> source = source_stage(schedule, compute);
  if (!source || same_rank(schedule, *source, compute.stage)) return std::nullopt;
  const Kind kind = compute.kind == Kind::Forward ? Kind::ReceiveForward : Kind::ReceiveBackward;
  return Action{kind, compute.stage, compute.micro_batch};
}

std::optional<Action> send_after(const Schedule& schedule, const Action& compute) {
  const bool forward = compute.kind == Kind::Forward;
  if (!forward && !makes_input_gradient(compute.kind)) return std::nullopt;
  const int target = compute.stage + (forward ? 1 : -1);
  if (!is_stage(schedule, target) || same_rank(schedule, target, compute.stage)) return std::nullopt;
  return Action{forward ? Kind::SendForward : Kind::SendBackward, compute.stage, compute.micro_batch};
}

Action receive_of(const Action& message) {
  if (message.kind == Kind::SendForward)
    return {Kind::ReceiveForward, message.stage + 1, message.micro_batch};
  if (message.kind == Kind::SendBackward)
    return {Kind::ReceiveBackward, message.stage - 1, message.micro_batch};
  return message;
}

Action send_of(const Action& message) {
  if (message.kind == Kind::ReceiveForward)
    return {Kind::SendForward, message.stage - 1, message.micro_batch};
  if (message.kind == Kind::ReceiveBackward)
    return {Kind::SendBackward, message.stage + 1, message.micro_batch};
  return message;
}

Channels::Channels(const Schedule& schedule)
    : forward_(schedule.num_stages, -1), backward_(schedule.num_stages, -1), into_(schedule.ranks.size()) {
  std::map<std::pair<int, int>, int> known;
  const auto channel = [&](int from_stage, int to_stage) {
    const std::pair ends(schedule.rank_of_stage[from_stage], schedule.rank_of_stage[to_stage]);
    if (ends.first == ends.second) return -1;
    const auto [at, is_new] = known.emplace(ends, size());
    if (is_new) {
      ends_.push_back({ends.first, ends.second});
      into_[ends.second].push_back(at->second);
    }
    return at->second;
  };
  for (int stage = 0; stage + 1 < schedule.num_stages; ++stage) {
    forward_[stage] = channel(stage, stage + 1);
    backward_[stage + 1] = channel(stage + 1, stage);
  }
}

int Channels::of(const Action& message) const {
  const Action send = send_of(message);
  const int channel = (send.kind == Kind::SendForward ? forward_ : backward_)[send.stage];
  TITAN_INTERNAL_ASSERT(channel >= 0, message, " stays on its rank");
  return channel;
}

Schedule parse_schedule_csv(std::string_view text, const std::filesystem::path& file) {
  return Reader(file).read(text);
}

Schedule read_schedule_csv(const std::filesystem::path& file) {
  return parse_schedule_csv(read_file(file), file);
}

std::string to_csv(const Schedule& schedule) {
  std::string text;
  for (const std::vector<Action>& actions : schedule.ranks) {
    for (size_t i = 0; i < actions.size(); ++i) text += (i == 0 ? "" : ",") + to_string(actions[i]);
    text += "\n";
  }
  return text;
}

}  // namespace titan::pipeline
