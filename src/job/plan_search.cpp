#include "job/plan_search.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "core/units.h"
#include "job/layout_estimates.h"
#include "plan/cost_model.h"
#include "titan/core/error.h"

namespace titan::train {

namespace {

/// Estimates of memory are rough: some are too small by this share, and few are too large.
constexpr double kMemoryMargin = 1.3, kMostTooLarge = 1.2;
/// If all larger micro-batches together can save no more than this share of a sequence's time, they aren't tried.
constexpr double kLeastGain = 0.005;
/// The share that they can save if only one is known.
constexpr double kMostGain = 0.2;
/// Estimates of pipelines are too long by up to this factor.
constexpr double kPipelineMargin = 1.1;
/// The share of the time that plans of what doesn't fit may take, if others wait that seem to fit.
constexpr double kMostMisfits = 0.1;

/// How long plans take by their work: a line through what they took so far. Blocks are next to no work, so they show what any plan takes.
class PlanningTime {
 public:
  void add(double work, double seconds) {
    ++num_;
    work_ += work;
    seconds_ += seconds;
    squares_ += work * work;
    products_ += work * seconds;
  }
  double of(double work) const {
    const double spread = num_ * squares_ - work_ * work_;
    const double slope = spread > 0 ? std::max(0.0, (num_ * products_ - work_ * seconds_) / spread) : 0;
    return std::max(0.0, (seconds_ - slope * work_) / num_) + slope * work;
  }

 private:
  double num_ = 0, work_ = 0, seconds_ = 0, squares_ = 0, products_ = 0;
};

struct Ranked {
  Layout layout;
  LayoutEstimate estimate;
};

class Search {
 public:
  Search(const JobConfig& base, const SearchOptions& options, const Planner& planner,
         const std::function<void(const std::string&)>& progress)
      : options_(options),
        planner_(planner),
        progress_(progress),
        num_layers_(base.spec().sizes(base.args()).num_layers),
        context_(base.parallelism.context),
        layouts_(all_layouts(base, options)),
        estimator_(base, options) {
    if (layouts_.empty()) throw ConfigError(why_no_layout(base, options));
  }

  SearchResult run() {
    result_.num_layouts = layouts_.size();
    progress_(str(layouts_.size(), " layouts"));
    estimate_all();
    result_.num_estimated = ranked_.size();
    if (ranked_.empty() && !result_.time_is_up)
      throw ConfigError("no layout can be planned" + unplanned_text(result_));
    for (const Ranked& each : ranked_)
      if (is_too_large(each.estimate)) does_not_fit(each.layout, each.estimate.bytes);
    std::erase_if(ranked_, [&](const Ranked& each) { return is_too_large(each.estimate); });
    std::ranges::stable_sort(ranked_, {}, [&](const Ranked& each) {
      const LayoutEstimate& estimate = each.estimate;
      return options_.least_memory ? std::pair(estimate.bytes, estimate.step_s)
                                   : std::pair(estimate.step_s, estimate.bytes);
    });
    plan_while_promising(ranked_);
    if (!result_.best.empty()) plan_while_promising(replicas_of(result_.best[0].layout));
    if (!result_.best.empty()) try_variants();
    if (result_.best.size() > options_.num_best) result_.best.resize(options_.num_best);
    return std::move(result_);
  }

 private:
  double usable() const { return static_cast<double>(options_.usable_bytes); }
  bool is_too_large(const LayoutEstimate& estimate) const {
    return estimate.bytes > kMostTooLarge * usable();
  }
  double value_of(const LayoutEstimate& estimate) const {
    return options_.least_memory ? estimate.bytes : estimate.step_s;
  }
  double value_of(const PlanAnswer& plan) const {
    return options_.least_memory ? static_cast<double>(plan.needed_bytes) : plan.step_s;
  }
  void does_not_fit(const Layout& layout, double bytes, bool is_least = false) {
    if (SearchResult::Smallest& smallest = result_.smallest; smallest.bytes == 0 || bytes < smallest.bytes)
      smallest = {layout, bytes, is_least};
  }
  void has_no_plan(const Layout& layout, const std::string& error, bool has_failed) {
    SearchResult::Unplanned& unplanned = has_failed ? result_.failed : result_.refused;
    ++unplanned.num;
    unplanned.last = str(layout.text(), ": ", error);
  }
  bool is_time_up(double share) const { return seconds_since(start_) > share * options_.seconds; }

  // ---- the first round

  void estimate_all() {
    std::vector<Layout> sharded, copied;
    for (const Layout& layout : layouts_) {
      const bool has_copies = layout.keeps_gathered || (layout.replicate > 1 && options_.replicate == 0);
      if (!has_copies)
        sharded.push_back(layout);
      else if (layout.pipeline == 1 && !options_.least_memory)
        copied.push_back(layout);
    }
    estimate_in_steps(sharded);
    const double limit = last_of_the_best();
    std::erase_if(copied, [&](const Layout& layout) { return !copies_may_help(layout, limit); });
    estimate_in_steps(copied);
  }

  static size_t place_of_recompute(const Layout& layout) {
    return static_cast<size_t>(std::ranges::find(kRecompute, layout.recompute) - kRecompute.begin());
  }

  // The layout, then the same with less recomputation, which computes less and takes no less memory. Of "selective" and "op" neither is less: that
  // depends on the lengths of sequences.
  static std::vector<Layout> with_no_more_recompute(const Layout& layout) {
    std::vector<Layout> all = {layout};
    for (size_t place = place_of_recompute(layout); place-- > 0;) {
      if (layout.recompute == "op" && kRecompute[place] == std::string("selective")) continue;
      all.push_back(layout);
      all.back().recompute = kRecompute[place];
    }
    return all;
  }
  bool fits_easily_with_less(const Layout& layout) const {
    return std::ranges::any_of(with_no_more_recompute(layout),
                               [&](const Layout& less) { return fits_easily_.contains(less); });
  }

  // Smaller micro-batches and less recomputation first, because they show what isn't needed; and Float8, which sets a limit for the others.
  void estimate_in_steps(const std::vector<Layout>& all) {
    std::map<std::tuple<int64_t, bool, size_t>, std::vector<Layout>> steps;
    for (const Layout& layout : all) {
      const size_t place = place_of_recompute(layout);
      steps[{layout.micro_batch, place > 0 && !layout.float8, place}].push_back(layout);
    }
    for (auto& [step, layouts] : steps) {
      if (options_.least_memory && std::get<0>(step) > 1) break;  // it takes no less
      const double limit = last_of_the_best();
      std::erase_if(layouts, [&](const Layout& layout) {
        return too_large_.contains(without_micro_batch(layout)) || fits_easily_with_less(layout) ||
               is_too_slow(layout, limit);
      });
      estimate(layouts);
    }
  }

  const BlockCosts* block_of(const Layout& layout) const {
    const auto found = blocks_.find(block_kind(layout));
    return found == blocks_.end() || !found->second.error.empty() ? nullptr : &found->second;
  }

  // A lower bound: the ranks never wait for those of other replicas. 0 if nothing is known.
  double least_seconds(const Layout& layout) const {
    const auto layers = static_cast<double>(num_layers_);
    const double micro_batches =
        static_cast<double>(estimator_.micro_batches(layout)) / static_cast<double>(layout.pipeline);
    Layout alone = layout;
    alone.pipeline = 2;
    if (const BlockCosts* block = block_of(alone)) return micro_batches * block->seconds.of(layers);
    // It may have been with collectives.
    const BlockCosts* block = block_of(layout);
    return block ? micro_batches * block->computing.of(layers) / (1 + plan::kContention) : 0;
  }

  // By what is known of the same layout with less recomputation and smaller micro-batches.
  bool is_too_slow(const Layout& layout, double limit) {
    if (options_.least_memory) return false;
    for (Layout known : with_no_more_recompute(layout)) {
      const auto tried = tried_.find(without_micro_batch(block_kind(known)));
      if (tried == tried_.end()) continue;
      const double gain = gain_of_larger(known, tried->second);
      if (known.recompute == layout.recompute && gain < kLeastGain) return true;
      if (std::isinf(limit)) continue;
      known.micro_batch = *tried->second.rbegin();
      const double share = 1 - (known.micro_batch < layout.micro_batch ? gain : 0);
      if (share * least_seconds(known) > limit) return true;
      if (layout.pipeline > 1 && share * seconds_with_bubble(layout, known) > kPipelineMargin * limit)
        return true;
    }
    return false;
  }

  // The layout's, if its blocks took the known layout's time for a sequence; 0 if nothing is known.
  double seconds_with_bubble(const Layout& layout, const Layout& known) {
    const BlockCosts* block = block_of(known);
    if (!block) return 0;
    BlockCosts costs = *block;
    const double micro_batches =
        static_cast<double>(layout.micro_batch) / static_cast<double>(known.micro_batch);
    costs.seconds = {micro_batches * costs.seconds.of_layer, micro_batches * costs.seconds.rest};
    return estimator_.of(layout, costs).step_s;
  }

  // The largest share of a sequence's time that larger micro-batches than those can save.
  double gain_of_larger(Layout layout, const std::set<int64_t>& micro_batches) const {
    if (micro_batches.size() == 1) return kMostGain;
    const auto seconds = [&](int64_t micro_batch) {
      layout.micro_batch = micro_batch;
      return block_of(layout)->seconds.of(static_cast<double>(num_layers_)) /
             static_cast<double>(micro_batch);
    };
    const int64_t larger = *micro_batches.rbegin(), smaller = *std::next(micro_batches.rbegin());
    // A sequence takes a + b / micro_batch, of which larger ones can save what is left of b.
    const double saved = std::max(0.0, 1 - seconds(larger) / seconds(smaller));
    return saved / (static_cast<double>(larger) / static_cast<double>(smaller) - 1);
  }

  static Layout without_micro_batch(Layout layout) {
    layout.micro_batch = 0;
    return layout;
  }

  void estimate(const std::vector<Layout>& layouts) {
    plan_kinds(layouts);
    for (const Layout& layout : layouts) {
      const auto found = blocks_.find(block_kind(layout));
      if (found == blocks_.end()) {
        ++result_.num_left;
        continue;
      }
      if (!found->second.error.empty()) {
        has_no_plan(layout, found->second.error, found->second.has_failed);
        continue;
      }
      const LayoutEstimate estimate = estimator_.of(layout, found->second);
      ranked_.push_back({layout, estimate});
      if (is_too_large(estimate)) too_large_.insert(without_micro_batch(layout));
      if (kMemoryMargin * estimate.bytes < usable() && estimate.delayed_tokens == 0 && !options_.least_memory)
        fits_easily_.insert(layout);
    }
  }

  void plan_kinds(const std::vector<Layout>& layouts) {
    std::set<Layout> kinds;
    for (const Layout& layout : layouts)
      if (Layout kind = block_kind(layout); !blocks_.contains(kind)) kinds.insert(std::move(kind));
    if (!kinds.empty())
      progress_(str("planning ", kinds.size(), kinds.size() == 1 ? " kind" : " kinds", " of blocks"));
    while (!kinds.empty()) {
      if (!blocks_.empty() && is_time_up(0.5)) {
        result_.time_is_up = true;
        return;
      }
      // As many as take some seconds.
      std::vector<std::pair<Layout, size_t>> some;  // with the end of their requests
      std::vector<PlanRequest> requests;
      while (!kinds.empty() && some.size() < 16 * options_.num_at_once) {
        Layout kind = std::move(kinds.extract(kinds.begin()).value());
        std::ranges::move(estimator_.block_requests(kind), std::back_inserter(requests));
        some.emplace_back(std::move(kind), requests.size());
      }
      const std::vector<PlanAnswer> answers = answers_to(requests);
      for (const PlanAnswer& block : answers)
        if (block.error.empty()) planning_time_.add(0, block.planning_s);
      size_t begin = 0;
      for (const auto& [kind, end] : some) {
        blocks_.emplace(kind,
                        estimator_.costs_of(kind, {answers.begin() + static_cast<std::ptrdiff_t>(begin),
                                                   answers.begin() + static_cast<std::ptrdiff_t>(end)}));
        if (blocks_.at(kind).error.empty()) tried_[without_micro_batch(kind)].insert(kind.micro_batch);
        begin = end;
      }
    }
  }

  std::vector<PlanAnswer> answers_to(const std::vector<PlanRequest>& requests) const {
    std::vector<PlanAnswer> answers(requests.size());
    size_t next = 0;
    planner_([&] { return next < requests.size() ? std::optional(requests[next++]) : std::nullopt; },
             [&](size_t number, const PlanAnswer& answer) { answers[number] = answer; });
    return answers;
  }

  // The estimate that a layout must beat. What isn't known to fit, because weight gradients are delayed, sets no limit.
  double last_of_the_best() const {
    std::vector<double> values;
    for (const Ranked& each : ranked_)
      if (each.estimate.bytes <= usable() && each.estimate.delayed_tokens == 0)
        values.push_back(value_of(each.estimate));
    if (values.size() < options_.num_best) return std::numeric_limits<double>::infinity();
    std::ranges::sort(values);
    return values[options_.num_best - 1];
  }

  // By what is known of the same layout without copies. If that one was left out because it fits with less recomputation, that one computes
  // less, and takes no less memory.
  bool copies_may_help(const Layout& layout, double limit) {
    Layout sharded = layout;
    sharded.replicate = std::max<int64_t>(options_.replicate, 1);
    sharded.keeps_gathered = false;
    for (const Layout& less : with_no_more_recompute(sharded)) {
      const BlockCosts* block = block_of(less);
      if (!block) continue;
      LayoutEstimate estimate{.bytes = estimator_.bytes_of_copies(layout, *block)};
      if (less.recompute == layout.recompute) estimate.bytes += estimator_.of(sharded, *block).bytes;
      return !is_too_large(estimate) && least_seconds(less) <= limit;
    }
    // If there was no time for that one, they may, and estimate() counts them.
    return result_.time_is_up && !blocks_.contains(block_kind(sharded)) &&
           !too_large_.contains(without_micro_batch(sharded)) && !is_too_slow(sharded, limit);
  }

  // ---- the second round

  // The candidates are in order of their estimates. Each plan improves the forecasts of memory and time, so each is chosen anew.
  void plan_while_promising(std::vector<Ranked> candidates) {
    std::vector<Ranked> asked;
    planner_(
        [&]() -> std::optional<PlanRequest> {
          drop_hopeless(candidates);
          const auto chosen = next_of(candidates);
          if (chosen == candidates.end()) return std::nullopt;
          asked.push_back(std::move(*chosen));
          candidates.erase(chosen);
          ++num_asked_;
          return PlanRequest{
              .settings = asked.back().layout.settings(options_.world, options_.sequences, num_layers_),
              .world = options_.world,
              .stops_above = options_.usable_bytes};
        },
        [&](size_t number, const PlanAnswer& plan) { take(asked[number], plan); });
    drop_hopeless(candidates);
    if (candidates.empty()) return;
    result_.time_is_up = true;
    result_.num_left += candidates.size();
  }

  void drop_hopeless(std::vector<Ranked>& candidates) {
    std::erase_if(candidates, [&](const Ranked& each) {
      const double bytes = memory_of(each).least;
      const bool is_too_far = is_too_large({.bytes = bytes});
      if (is_too_far) does_not_fit(each.layout, bytes);
      return is_too_far || !is_promising(each);
    });
  }

  // The first that may be the best and may fit; then the first that seems to fit; then any. While nothing fits, the first two take turns.
  // That a layout doesn't fit shows early, so trying takes little time; but it may add up.
  std::vector<Ranked>::iterator next_of(std::vector<Ranked>& candidates) const {
    const auto first = [&](const auto& is_wanted) {
      return std::ranges::find_if(
          candidates, [&](const Ranked& each) { return has_time_for(each.layout) && is_wanted(each); });
    };
    const bool may_try =
        misfits_s_ < kMostMisfits * options_.seconds * static_cast<double>(options_.num_at_once);
    if (may_try && !(result_.best.empty() && num_asked_ % 2 == 1)) {
      const auto best = first([&](const Ranked& each) {
        return memory_of(each).least <= usable() &&
               (result_.best.empty() ||
                value_of(each.estimate) * most_pessimistic_ < value_of(result_.best[0].plan));
      });
      if (best != candidates.end()) return best;
    }
    const auto fitting = first([&](const Ranked& each) { return seems_to_fit(each); });
    return fitting != candidates.end() ? fitting : first([](const Ranked&) { return true; });
  }

  bool is_promising(const Ranked& each) const {
    return result_.best.size() < options_.num_best ||
           value_of(each.estimate) * most_pessimistic_ < value_of(result_.best[options_.num_best - 1].plan);
  }
  bool seems_to_fit(const Ranked& each) const { return memory_of(each).most <= usable(); }

  struct Range {
    double least = 0, most = 0;
  };
  // The estimate's bytes, if it errs as those of its kind have so far. What delayed weight gradients keep is added, as plans of its kind have had;
  // while there is none, and for all layouts while nothing fits, the estimate must leave a margin.
  Range memory_of(const Ranked& each) const {
    const auto& [layout, estimate] = each;
    if (estimate.delayed_tokens > 0) {
      const auto found = bytes_of_delayed_.find(delayed_kind(layout));
      if (found == bytes_of_delayed_.end()) return {estimate.bytes, kMemoryMargin * estimate.bytes};
      const Range& of_token = found->second;
      return {estimate.bytes + of_token.least * estimate.delayed_tokens,
              estimate.bytes + of_token.most * estimate.delayed_tokens};
    }
    Range error{1, 1};
    if (const auto found = memory_errors_.find(memory_kind(layout)); found != memory_errors_.end())
      error = found->second;
    else if (result_.best.empty())
      error.most = kMemoryMargin;
    return {error.least * estimate.bytes, error.most * estimate.bytes};
  }
  // Errors of memory depend on these most: in deep pipelines, more micro-batches wait for their backward.
  using MemoryKind = std::tuple<std::string, int64_t, std::string>;
  static MemoryKind memory_kind(const Layout& layout) {
    return {layout.schedule, layout.pipeline, layout.recompute};
  }
  // These decide how much delayed weight gradients keep for a token of a layer: its inputs and gradients of outputs.
  using DelayedKind = std::tuple<int64_t, std::string>;
  static DelayedKind delayed_kind(const Layout& layout) { return {layout.tensor, layout.recompute}; }
  template <class Kind>
  static void widen(std::map<Kind, Range>& ranges, const Kind& kind, double value) {
    Range& range = ranges.try_emplace(kind, value, value).first->second;
    range = {std::min(range.least, value), std::max(range.most, value)};
  }
  void add_error(const Ranked& planned, double needed) {
    const auto& [layout, estimate] = planned;
    if (estimate.delayed_tokens > 0)
      widen(bytes_of_delayed_, delayed_kind(layout),
            std::max(0.0, (needed - estimate.bytes) / estimate.delayed_tokens));
    else
      widen(memory_errors_, memory_kind(layout), needed / estimate.bytes);
  }

  // A plan's layers' micro-batches. The first ones are planned in any case.
  double work_of(const Layout& layout) const {
    return static_cast<double>(num_layers_ * estimator_.micro_batches(layout));
  }
  bool has_time_for(const Layout& layout) const {
    return num_asked_ == 0 || seconds_since(start_) + planning_time_.of(work_of(layout)) < options_.seconds;
  }

  // Adds it to the best if it fits.
  void take(const Ranked& asked, const PlanAnswer& plan) {
    const auto& [layout, estimate] = asked;
    if (!plan.error.empty()) return has_no_plan(layout, plan.error, plan.has_failed);
    ++result_.num_planned;
    planning_time_.add(plan.share_rehearsed * work_of(layout), plan.planning_s);
    const bool fits = plan.needed_bytes <= options_.usable_bytes, is_whole = plan.share_rehearsed == 1;
    const auto needed = static_cast<double>(plan.needed_bytes);
    add_error(asked, needed);
    if (is_whole) most_pessimistic_ = std::min(most_pessimistic_, value_of(plan) / value_of(estimate));
    progress_(str(
        layout.text(), ": ", is_whole ? str(std::lround(1e3 * plan.step_s), " ms (estimate ") : "(estimate ",
        std::lround(1e3 * estimate.step_s), " ms), ", is_whole ? "" : "at least ", std::lround(needed / kGiB),
        " GiB (estimate ", std::lround(estimate.bytes / kGiB), " GiB)", fits ? "" : ", doesn't fit"));
    if (!fits) {
      ++result_.num_too_large;
      misfits_s_ += plan.planning_s;
      return does_not_fit(layout, needed, !is_whole);
    }
    const auto place = std::ranges::upper_bound(
        result_.best, value_of(plan), {}, [&](const FoundLayout& found) { return value_of(found.plan); });
    result_.best.insert(place, {layout, plan, estimate.step_s, estimate.bytes});
  }

  std::vector<Ranked> replicas_of(const Layout& best) {
    std::vector<Ranked> replicas;
    if (best.pipeline == 1 || options_.least_memory) return replicas;
    for (const Layout& layout : layouts_) {
      Layout same = layout;
      same.replicate = best.replicate;
      if (layout == best || same != best) continue;
      const LayoutEstimate estimate = estimator_.of(layout, blocks_.at(block_kind(layout)));
      if (!is_too_large(estimate)) replicas.push_back({layout, estimate});
    }
    return replicas;
  }

  // Instead of estimates, they have the best one's plan.
  void try_variants() {
    const FoundLayout best = result_.best[0];
    std::vector<Ranked> variants;
    const auto add = [&](const auto& change) {
      Layout layout = best.layout;
      change(layout);
      variants.push_back(
          {layout, {.step_s = best.plan.step_s, .bytes = static_cast<double>(best.plan.needed_bytes)}});
    };
    if (best.layout.only_degrees) return;
    const auto& [tensor, context, pipeline, replicate] =
        std::tie(best.layout.tensor, best.layout.context, best.layout.pipeline, best.layout.replicate);
    const int64_t sharing = options_.world / (tensor * pipeline * replicate);
    const int64_t of_host = options_.host_devices / tensor;
    if (!options_.least_memory && pipeline == 1 && !best.layout.keeps_gathered && of_host > 1 &&
        sharing > of_host && sharing % of_host == 0)
      add([&](Layout& layout) { layout.reshard = of_host; });
    if (options_.may_gather_float8 && best.layout.float8 && sharing > 1)
      add([](Layout& layout) { layout.float8_gather = true; });
    using Names = std::pair<const char*, const char*>;
    for (const auto& [attention, rotate_method] :
         {Names("ring", "allgather"), Names("ring", "alltoall"), Names("allgather_kv", "allgather")}) {
      if (context == 1 || !options_.may_change_context ||
          (attention == context_.attention && rotate_method == context_.rotate_method))
        continue;
      add([&](Layout& layout) {
        layout.context_attention = attention;
        layout.rotate_method = rotate_method;
      });
    }
    plan_while_promising(variants);
    std::erase_if(result_.best, [&](const FoundLayout& found) {
      return found.layout.is_variant() && value_of(found.plan) >= value_of(best.plan);
    });
  }

  const SearchOptions& options_;
  const Planner& planner_;
  const std::function<void(const std::string&)>& progress_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  int64_t num_layers_;
  ContextParallelSettings context_;  // the base's
  std::vector<Layout> layouts_;
  LayoutEstimator estimator_;
  std::map<Layout, BlockCosts> blocks_;        // by kind
  std::map<Layout, std::set<int64_t>> tried_;  // micro-batches, by kind without them
  std::set<Layout> too_large_;                 // whatever larger micro-batch they have
  std::set<Layout> fits_easily_;               // so more recomputation isn't needed
  std::vector<Ranked> ranked_;
  PlanningTime planning_time_;
  size_t num_asked_ = 0;                       // layouts that the planner was asked for in the second round
  double misfits_s_ = 0;                       // the time that plans of what doesn't fit took
  double most_pessimistic_ = 1;                // the smallest quotient of a plan's value and its estimate
  std::map<MemoryKind, Range> memory_errors_;  // quotients of a plan's bytes and its estimate's
  std::map<DelayedKind, Range> bytes_of_delayed_;  // for a token of a layer, in plans so far
  SearchResult result_;
};

}  // namespace

std::string unplanned_text(const SearchResult& result) {
  const auto text_of = [](const SearchResult::Unplanned& unplanned, const char* what) {
    return unplanned.num == 0 ? "" : str("\n", what, ": ", unplanned.num, "; the last one: ", unplanned.last);
  };
  return text_of(result.refused, "layouts that the program refused") +
         text_of(result.failed, "layouts that could not be planned because of an error");
}

SearchResult search_layouts(const JobConfig& base, const SearchOptions& options, const Planner& planner,
                            const std::function<void(const std::string&)>& progress) {
  return Search(base, options, planner, progress).run();
}

}  // namespace titan::train
