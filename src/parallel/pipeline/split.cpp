#include "titan/parallel/pipeline_split.h"

#include <algorithm>
#include <map>

#include "titan/core/error.h"

namespace titan::pipeline {

std::vector<std::string> ModuleSequence::names() const {
  std::vector<std::string> all = before;
  all.insert(all.end(), layers.begin(), layers.end());
  all.insert(all.end(), after.begin(), after.end());
  return all;
}

int count_stages(int64_t num_layers, EndWeights ends, int64_t layers_per_stage) {
  TITAN_CHECK(layers_per_stage >= 1, "a stage of ", layers_per_stage, " layers");
  return static_cast<int>((num_layers + ends.first + ends.last + layers_per_stage - 1) / layers_per_stage);
}

StageModules split_evenly(const ModuleSequence& sequence, int num_stages, EndWeights ends) {
  if (num_stages < 1) throw ConfigError(str("a model can't be cut into ", num_stages, " stages"));
  if (num_stages == 1) return {sequence.names()};
  const auto num_layers = static_cast<int64_t>(sequence.layers.size());
  const int64_t effective = num_layers + ends.first + ends.last;
  if (num_stages > effective)
    throw ConfigError(str(num_stages, " stages are more than the ", num_layers,
                          " layers and the embedding and head, which count for ", ends.first, " and ",
                          ends.last));
  const int64_t share = effective / num_stages, stages_with_one_more = effective % num_stages;
  const auto check_end = [&](const char* which, int64_t weight) {
    if (weight > share)
      throw ConfigError(str("the ", which, " stage's ends count for ", weight, " layers (",
                            "pipeline_parallel_", which, "_stage_less_layers), but a stage has ", share));
  };
  check_end("first", ends.first);
  check_end("last", ends.last);

  StageModules stages;
  auto next = sequence.layers.begin();
  for (int stage = 0; stage < num_stages; ++stage) {
    int64_t count = share + (stage < stages_with_one_more ? 1 : 0);
    if (stage == 0) count -= ends.first;
    if (stage == num_stages - 1) count -= ends.last;
    stages.emplace_back(next, next + count);
    next += count;
  }
  stages.front().insert(stages.front().begin(), sequence.before.begin(), sequence.before.end());
  stages.back().insert(stages.back().end(), sequence.after.begin(), sequence.after.end());
  for (int stage = 0; stage < num_stages; ++stage)
    if (stages[static_cast<size_t>(stage)].empty())
      throw ConfigError(str("stage ", stage, " of ", num_stages, " is left without modules"));
  return stages;
}

namespace {

std::string meant(const std::string& name, const std::vector<std::string>& known) {
  const auto near = nearest_names(name, known, 1);
  return near.empty() ? "" : str("; did you mean '", near[0], "'?");
}

// Compares lists with the sequence they have to be a cut of.
class ListChecker {
 public:
  explicit ListChecker(std::vector<std::string> known) : known_(std::move(known)) {
    for (size_t i = 0; i < known_.size(); ++i) position_[known_[i]] = i;
  }

  std::vector<std::string> problems_of(const StageModules& lists) {
    if (lists.empty()) problems_.push_back("there is no stage");
    for (size_t stage = 0; stage < lists.size(); ++stage) {
      if (lists[stage].empty()) problems_.push_back(str("stage ", stage, " has no modules"));
      for (const std::string& name : lists[stage]) take(name, stage);
    }
    std::vector<std::string> missing;
    for (const std::string& name : known_)
      if (!stage_.contains(name)) missing.push_back(name);
    if (!missing.empty()) problems_.push_back("no stage has " + short_list(missing));
    return std::move(problems_);
  }

 private:
  void take(const std::string& name, size_t stage) {
    const auto position = position_.find(name);
    if (position == position_.end()) {
      problems_.push_back(str("stage ", stage, ": the model has no module '", name,
                              "' that it calls in a row", meant(name, known_)));
      return;
    }
    const auto [first, is_new] = stage_.try_emplace(name, stage);
    if (!is_new) {
      problems_.push_back(str("stages ", first->second, " and ", stage, " both have '", name, "'"));
      return;
    }
    if (position->second < furthest_)
      problems_.push_back(str("stage ", stage, ": '", name, "' is listed after '", known_[furthest_],
                              "', but the model calls it before"));
    furthest_ = std::max(furthest_, position->second);
  }

  std::vector<std::string> known_;
  std::map<std::string, size_t> position_;  // in the sequence
  std::map<std::string, size_t> stage_;     // of those already taken
  size_t furthest_ = 0;
  std::vector<std::string> problems_;
};

}  // namespace

StageModules split_by_lists(const ModuleSequence& sequence, const StageModules& lists) {
  std::vector<std::string> problems = ListChecker(sequence.names()).problems_of(lists);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  return lists;
}

namespace {

// "layers.7" is number 7 after "layers."; -1 where a name doesn't end in a number.
std::pair<std::string, int64_t> numbered(const std::string& name) {
  const size_t begin = name.rfind('.') + 1;
  const std::string number = name.substr(begin);
  const bool is_number = begin > 0 && !number.empty() && number.size() < 10 &&
                         number.find_first_not_of("0123456789") == std::string::npos;
  if (!is_number) return {name, -1};
  return {name.substr(0, begin), std::stoll(number)};
}

}  // namespace

std::string short_list(const std::vector<std::string>& modules) {
  std::string text;
  for (size_t begin = 0; begin < modules.size();) {
    const auto [list, first] = numbered(modules[begin]);
    size_t end = begin + 1;
    while (first >= 0 && end < modules.size() &&
           numbered(modules[end]) == std::pair(list, first + static_cast<int64_t>(end - begin)))
      ++end;
    text += str(text.empty() ? "" : ", ", modules[begin]);
    if (end - begin > 1) text += str("..", first + static_cast<int64_t>(end - begin) - 1);
    begin = end;
  }
  return text;
}

}  // namespace titan::pipeline
