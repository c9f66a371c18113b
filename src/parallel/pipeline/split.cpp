#include "parallel/pipeline/split.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "core/units.h"
#include "parallel/pipeline/actions.h"
#include "titan/core/error.h"

namespace titan::pipeline {

std::vector<std::string> ModuleSequence::names() const {
  std::vector<std::string> all = before;
  all.insert(all.end(), layers.begin(), layers.end());
  all.insert(all.end(), after.begin(), after.end());
  return all;
}

int count_stages(int64_t num_layers, EndWeights ends, int64_t layers_per_stage) {
  TITAN_CHECK(layers_per_stage >= 1, "expected layers_per_stage of 1 or more, got ", layers_per_stage);
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

StageModules split_by_lists(const ModuleSequence& sequence, const StageModules& lists) {
  const std::vector<std::string> known = sequence.names();
  std::vector<std::string> problems;
  std::map<std::string, size_t> stage_of;  // the modules listed so far
  size_t furthest = 0;                     // the last position of a listed module in the sequence
  const auto take = [&](const std::string& name, size_t stage) {
    const auto position = static_cast<size_t>(std::find(known.begin(), known.end(), name) - known.begin());
    if (position == known.size()) {
      problems.push_back(str("stage ", stage, ": the model calls no module '", name, "' in its sequence",
                             did_you_mean(name, known)));
      return;
    }
    const auto [first, is_new] = stage_of.try_emplace(name, stage);
    if (!is_new) {
      problems.push_back(str("stages ", first->second, " and ", stage, " both have '", name, "'"));
      return;
    }
    if (position < furthest)
      problems.push_back(str("stage ", stage, ": '", name, "' is listed after '", known[furthest],
                             "', but the model calls it earlier"));
    furthest = std::max(furthest, position);
  };
  if (lists.empty()) problems.push_back("the split has no stages");
  for (size_t stage = 0; stage < lists.size(); ++stage) {
    if (lists[stage].empty()) problems.push_back(str("stage ", stage, " has no modules"));
    for (const std::string& name : lists[stage]) take(name, stage);
  }
  std::vector<std::string> missing;
  for (const std::string& name : known)
    if (!stage_of.contains(name)) missing.push_back(name);
  if (!missing.empty()) problems.push_back("no stage has " + short_list(missing));
  if (!problems.empty()) throw ConfigError(std::move(problems));
  return lists;
}

namespace {

// {"layers.", 7} for "layers.7"; -1 if the name doesn't end in a number.
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

// The split into stages of equal time.

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1e-12;  // the largest relative difference between sums of the same costs

// Sums of costs over runs of modules.
class Runs {
 public:
  Runs(const std::vector<ModuleCost>& costs, const BalanceOptions& options)
      : options_(options), times_(1), fixed_(1), activations_(1) {
    for (const ModuleCost& cost : costs) {
      times_.push_back(times_.back() + cost.time_s());
      fixed_.push_back(fixed_.back() + cost.fixed_bytes);
      activations_.push_back(activations_.back() + cost.activation_bytes);
    }
  }

  int num_modules() const { return static_cast<int>(times_.size()) - 1; }
  double time(int begin, int end) const { return of(times_, begin, end); }
  double bytes(int stage, int begin, int end) const {
    const auto& live = options_.live_micro_batches;
    const double micro_batches = live.size() == 1 ? live[0] : live[static_cast<size_t>(stage)];
    return of(fixed_, begin, end) + micro_batches * of(activations_, begin, end);
  }
  bool bytes_fit(double bytes) const { return bytes <= options_.memory_bytes * (1 + kRounding); }

 private:
  static double of(const std::vector<double>& sums, int begin, int end) {
    return sums[static_cast<size_t>(end)] - sums[static_cast<size_t>(begin)];
  }

  const BalanceOptions& options_;
  std::vector<double> times_, fixed_, activations_;
};

using Bounds = std::vector<int>;  // stage s has the modules bounds[s] .. bounds[s + 1] - 1

// The split of least cost in which each stage by itself fits its rank; empty if there is none. `combine` adds
// a stage's time to the cost of the stages before it.
template <class Combine>
Bounds best_bounds(const Runs& runs, int num_stages, double longest, const Combine& combine) {
  const int n = runs.num_modules();
  const auto cell = [&](int stage, int end) { return static_cast<size_t>(stage * (n + 1) + end); };
  std::vector<double> best(cell(num_stages, n) + 1, kInfinity);
  std::vector<int> begin_of(best.size(), -1);
  best[cell(0, 0)] = 0;
  for (int stage = 0; stage < num_stages; ++stage)
    for (int end = stage + 1; end <= n - (num_stages - 1 - stage); ++end)
      for (int begin = end - 1; begin >= stage; --begin) {
        const double time = runs.time(begin, end);
        if (time > longest * (1 + kRounding) || !runs.bytes_fit(runs.bytes(stage, begin, end))) break;
        const double cost = combine(best[cell(stage, begin)], time);
        if (cost >= best[cell(stage + 1, end)]) continue;
        best[cell(stage + 1, end)] = cost;
        begin_of[cell(stage + 1, end)] = begin;
      }
  if (best[cell(num_stages, n)] == kInfinity) return {};
  Bounds bounds(static_cast<size_t>(num_stages) + 1, n);
  for (int stage = num_stages; stage > 0; --stage)
    bounds[static_cast<size_t>(stage) - 1] = begin_of[cell(stage, bounds[static_cast<size_t>(stage)])];
  return bounds;
}

double largest_time(const Runs& runs, const Bounds& bounds) {
  double largest = 0;
  for (size_t stage = 0; stage + 1 < bounds.size(); ++stage)
    largest = std::max(largest, runs.time(bounds[stage], bounds[stage + 1]));
  return largest;
}

bool ranks_fit(const Runs& runs, const Bounds& bounds, const std::vector<int>& rank_of_stage) {
  std::vector<double> bytes(rank_of_stage.size());
  for (size_t stage = 0; stage < rank_of_stage.size(); ++stage)
    bytes[static_cast<size_t>(rank_of_stage[stage])] +=
        runs.bytes(static_cast<int>(stage), bounds[stage], bounds[stage + 1]);
  return std::all_of(bytes.begin(), bytes.end(), [&](double each) { return runs.bytes_fit(each); });
}

// [Note: ranks one after the other]
// A rank with several stages has runs of modules that are far apart but share its memory. Stages form chunks
// with one stage per rank; in each chunk rank r's stage is next to rank r - 1's, to its right or, on the way
// back of a V, to its left. So ranks are handled in order, each takes a run from every chunk, and later ranks
// depend only on the fronts of the chunks. Fronts that lead to no solution are tried only once.
class RankSearch {
 public:
  RankSearch(const Runs& runs, const std::vector<int>& rank_of_stage)
      : runs_(runs), num_stages_(static_cast<int>(rank_of_stage.size())) {
    num_ranks_ = 1 + *std::max_element(rank_of_stage.begin(), rank_of_stage.end());
    num_chunks_ = num_stages_ / num_ranks_;
    goes_back_ = num_chunks_ > 1 && num_ranks_ > 1 && rank_of_stage[static_cast<size_t>(num_ranks_)] != 0;
    for (int stage = 0; stage < num_stages_; ++stage) {
      const int at = stage % num_ranks_;
      TITAN_CHECK(
          num_stages_ % num_ranks_ == 0 && rank_of_stage[static_cast<size_t>(stage)] ==
                                               (to_the_left(stage / num_ranks_) ? num_ranks_ - 1 - at : at),
          "a balanced split with a memory limit supports loops and Vs of stages only");
    }
  }

  // A split whose stages take at most `longest`; empty if there is none.
  Bounds find(double longest) {
    longest_ = longest * (1 + kRounding);
    chunks_.assign(1, 0);
    bounds_.assign(static_cast<size_t>(num_stages_) + 1, runs_.num_modules());
    return place_chunks() ? bounds_ : Bounds{};
  }

 private:
  using Fronts = std::vector<int>;

  bool to_the_left(int chunk) const { return goes_back_ && chunk % 2 == 1; }
  bool can_take(int begin, int end, int ranks) const {
    return end - begin >= ranks && runs_.time(begin, end) <= ranks * longest_ * (1 + kRounding);
  }

  // Tries all places for the chunks' borders.
  bool place_chunks() {
    const int begin = chunks_.back(), n = runs_.num_modules();
    const auto placed = static_cast<int>(chunks_.size());
    if (placed == num_chunks_) {
      if (!can_take(begin, n, num_ranks_)) return false;
      chunks_.push_back(n);
      const bool found = deal();
      chunks_.pop_back();
      return found;
    }
    for (int end = begin + num_ranks_; end <= n; ++end) {
      if (!can_take(begin, end, num_ranks_)) break;
      chunks_.push_back(end);
      const bool found = place_chunks();
      chunks_.pop_back();
      if (found) return true;
    }
    return false;
  }

  bool deal() {
    dead_ends_.clear();
    Fronts fronts;
    for (int chunk = 0; chunk < num_chunks_; ++chunk)
      fronts.push_back(chunks_[static_cast<size_t>(chunk + (to_the_left(chunk) ? 1 : 0))]);
    return serve(0, fronts);
  }

  // Places all ranks from `rank` on.
  bool serve(int rank, const Fronts& fronts) {
    if (rank == num_ranks_) return true;
    Fronts key = fronts;
    key.push_back(rank);
    if (dead_ends_.contains(key)) return false;
    if (take(rank, 0, 0, fronts)) return true;
    dead_ends_.insert(std::move(key));
    return false;
  }

  // Places the runs of one rank, chunk by chunk.
  bool take(int rank, int chunk, double bytes, const Fronts& fronts) {
    if (chunk == num_chunks_) return serve(rank + 1, fronts);
    const int later = num_ranks_ - 1 - rank, stage = chunk * num_ranks_ + (to_the_left(chunk) ? later : rank);
    const bool left = to_the_left(chunk);
    const int front = fronts[static_cast<size_t>(chunk)];
    const int stop = chunks_[static_cast<size_t>(chunk + (left ? 0 : 1))];
    const int most = std::abs(stop - front) - later;
    for (const int count : counts(front, stop, later, most)) {
      const int begin = left ? front - count : front, end = begin + count;
      const double more = bytes + runs_.bytes(stage, begin, end);
      if (!runs_.bytes_fit(more)) continue;
      Fronts next = fronts;
      next[static_cast<size_t>(chunk)] = left ? begin : end;
      if (!take(rank, chunk + 1, more, next)) continue;
      bounds_[static_cast<size_t>(stage)] = begin;
      return true;
    }
    return false;
  }

  // The counts of modules that the next rank may take from a chunk, the nearest to an even share first.
  std::vector<int> counts(int front, int stop, int later, int most) const {
    std::vector<int> possible;
    const bool left = stop < front;
    for (int count = later == 0 ? most : 1; count <= most; ++count) {
      const int next = left ? front - count : front + count;
      if (runs_.time(std::min(front, next), std::max(front, next)) > longest_) break;
      if (later == 0 || can_take(std::min(next, stop), std::max(next, stop), later))
        possible.push_back(count);
    }
    const int even = (most + later) / (later + 1);
    std::stable_sort(possible.begin(), possible.end(),
                     [&](int a, int b) { return std::abs(a - even) < std::abs(b - even); });
    return possible;
  }

  const Runs& runs_;
  int num_stages_, num_ranks_ = 1, num_chunks_ = 1;
  bool goes_back_ = false;
  double longest_ = 0;
  std::vector<int> chunks_;  // where each begins, and the end of the last
  Bounds bounds_;
  std::set<Fronts> dead_ends_;
};

// Candidates for the slowest stage's time: the times of all runs, from `least` up.
std::vector<double> candidate_times(const Runs& runs, double least) {
  std::vector<double> times;
  for (int begin = 0; begin < runs.num_modules(); ++begin)
    for (int end = begin + 1; end <= runs.num_modules(); ++end)
      if (const double time = runs.time(begin, end); time >= least * (1 - kRounding)) times.push_back(time);
  std::sort(times.begin(), times.end());
  return times;
}

[[noreturn]] void throw_too_large(const BalanceOptions& options) {
  throw ConfigError(str("no split into ", options.rank_of_stage.size(), " stages keeps every rank within ",
                        options.memory_bytes / kGiB, " GiB"));
}

Bounds search_with_memory(const Runs& runs, const BalanceOptions& options, double least) {
  RankSearch search(runs, options.rank_of_stage);
  const std::vector<double> times = candidate_times(runs, least);
  Bounds best;
  size_t low = 0, high = times.size();  // the answer is in low .. high; times.size(): no split
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    Bounds found = search.find(times[middle]);
    if (found.empty()) {
      low = middle + 1;
    } else {
      best = std::move(found);
      high = middle;
    }
  }
  if (best.empty()) throw_too_large(options);
  return best;
}

void check_input(const std::vector<ModuleCost>& costs, const BalanceOptions& options) {
  const size_t stages = options.rank_of_stage.size();
  const auto sound = [](double number) { return number >= 0 && number < kInfinity; };
  for (const ModuleCost& cost : costs)
    TITAN_CHECK(sound(cost.forward_s) && sound(cost.backward_s) && sound(cost.fixed_bytes) &&
                    sound(cost.activation_bytes),
                "costs of modules can't be negative or infinite");
  TITAN_CHECK(options.live_micro_batches.size() == 1 || options.live_micro_batches.size() == stages,
              "live micro-batches of ", options.live_micro_batches.size(), " stages, of ", stages);
  if (stages < 1 || stages > costs.size())
    throw ConfigError(str(costs.size(), " modules can't be cut into ", stages, " stages"));
}

Bounds balanced_bounds(const std::vector<ModuleCost>& costs, const BalanceOptions& options) {
  check_input(costs, options);
  const Runs runs(costs, options);
  const auto num_stages = static_cast<int>(options.rank_of_stage.size());
  const Bounds fastest = best_bounds(runs, num_stages, kInfinity,
                                     [](double before, double time) { return std::max(before, time); });
  if (fastest.empty()) throw_too_large(options);
  const double least = largest_time(runs, fastest);
  const Bounds even =
      best_bounds(runs, num_stages, least, [](double before, double time) { return before + time * time; });
  if (ranks_fit(runs, even, options.rank_of_stage)) return even;
  return search_with_memory(runs, options, least);
}

}  // namespace

std::vector<double> live_micro_batches(const Schedule& schedule) {
  std::vector<double> peaks(static_cast<size_t>(schedule.num_stages)), live(peaks.size());
  for (const auto& actions : schedule.ranks) {
    for (const Action& action : actions) {
      const auto stage = static_cast<size_t>(action.stage);
      if (action.kind == Action::Kind::Forward) peaks[stage] = std::max(peaks[stage], ++live[stage]);
      if (ends_backward(action.kind)) --live[stage];
    }
  }
  return peaks;
}

std::vector<int> balanced_counts(const std::vector<ModuleCost>& costs, const BalanceOptions& options) {
  const Bounds bounds = balanced_bounds(costs, options);
  std::vector<int> counts;
  for (size_t stage = 0; stage + 1 < bounds.size(); ++stage)
    counts.push_back(bounds[stage + 1] - bounds[stage]);
  return counts;
}

StageModules split_balanced(const ModuleSequence& sequence, const std::vector<ModuleCost>& costs,
                            const BalanceOptions& options) {
  const std::vector<std::string> names = sequence.names();
  TITAN_CHECK(names.size() == costs.size(), "costs of ", costs.size(), " modules, of ", names.size());
  StageModules stages;
  auto next = names.begin();
  for (const int count : balanced_counts(costs, options)) {
    stages.emplace_back(next, next + count);
    next += count;
  }
  return stages;
}

}  // namespace titan::pipeline
