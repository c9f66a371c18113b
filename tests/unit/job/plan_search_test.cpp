// A search with a planner whose costs are formulas, so that the best of all layouts is known.

#include "job/plan_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "titan/config/load.h"
#include "titan/core/error.h"
#include "titan/models/llama3.h"
#include "titan/parallel/pipeline_schedule.h"

namespace titan::train {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kWorld = 16;
constexpr int64_t kSequences = 32, kNumLayers = 32;
constexpr double kParametersOfLayer = 0.25e9, kParametersOfEnds = 1e9;

// "op" is another policy than the config's, which is every `option`-th layer.
JobConfig searched_job(const std::string& option = "2") {
  if (!model_specs().contains("llama3")) models::register_llama3();
  JobConfig config;
  config::load(job_schema(), {std::string(TITAN_SOURCE_DIR) + "/configs/llama3_8b.toml", {}}, config);
  config.activation_checkpoint.selective_ac_option = option;
  return config;
}

struct ScheduleRun {
  double time = 0;  // a stage's forward and backward take 1
  int live = 0;
};

ScheduleRun run_schedule(const std::string& name, int depth, int stages, int micro_batches) {
  static std::map<std::tuple<std::string, int, int, int>, ScheduleRun> runs;
  const auto [found, is_new] = runs.try_emplace({name, depth, stages, micro_batches});
  if (!is_new) return found->second;
  const pipeline::Simulation simulation =
      pipeline::simulate(pipeline::make_schedule(name, depth, stages, micro_batches),
                         {.forward = {1 / 3.0}, .input = {1 / 3.0}, .weight = {1 / 3.0}});
  found->second.time = simulation.makespan;
  for (const pipeline::RankFigures& rank : simulation.ranks)
    found->second.live = std::max(found->second.live, rank.peak_live);
  return found->second;
}

using PlanOne = std::function<PlanAnswer(const PlanRequest&)>;

/// Plans one job after the other.
Planner one_by_one(const PlanOne& plan) {
  return [=](const NextRequest& next, const TakeAnswer& take) {
    size_t number = 0;
    while (const auto request = next()) take(number++, plan(*request));
  };
}

bool is_block(const PlanRequest& request) { return request.settings.back().key == "n_layers"; }

/// A planner whose jobs take times in units of a layer's micro-batch of one sequence.
struct FakeCluster {
  double exchange = 0.1;  // a layer's parameters, between two ranks
  double usable_bytes = 80e9;
  double activation_bytes = 1e9;  // a layer's, for a sequence
  double fixed_s = 0.02;          // a layer's, for a micro-batch of any size
  std::string neighbors = "8";    // that share parameters between forward and backward, with
  double neighbors_gain = 1;      // so many of the exchange's seconds
  double delayed_bytes = 1;       // times the activations, where weight gradients are delayed
  double layers_work = 1.1,
         op_work = 1.15;  // recomputation of every second layer, and by operation: its work
  double layers_bytes = 0.6, op_bytes = 0.4;  // and its activations
  mutable size_t num_plans = 0;

  PlanAnswer plan(const PlanRequest& request) const {
    ++num_plans;
    std::map<std::string, std::string> values;
    for (const auto& [section, key, value] : request.settings) values[section + "." + key] = value;
    const auto number = [&](const std::string& key, double otherwise = 0) {
      const auto found = values.find(key);
      return found == values.end() ? otherwise : std::stod(found->second);
    };
    const double layers = number("model.args.n_layers", kNumLayers), world = request.world;
    const double tensor = number("parallelism.tensor_parallel_degree"),
                 context = number("parallelism.context_parallel_degree"),
                 depth = number("parallelism.pipeline_parallel_degree"),
                 replicate = number("parallelism.data_parallel_replicate_degree");
    const double replicas = world / (tensor * context * depth);
    const double micro_batch =
        number(depth > 1 ? "parallelism.pipeline_parallel_microbatch_size" : "training.local_batch_size");
    const double micro_batches = number("training.global_batch_size") / replicas / micro_batch;
    const bool by_op = values["activation_checkpoint.selective_ac_option"] == "\"op\"";
    const std::string recompute = by_op ? "\"op\"" : values["activation_checkpoint.mode"];
    const bool keeps = values["parallelism.fsdp_reduce_every_micro_batch"] == "false";
    const bool asynchronous = values["parallelism.enable_async_tensor_parallel"] == "true";
    const bool float8 = values.contains("model.converters");

    const double work = micro_batch / (tensor * context) *
                        (1 + 0.1 * std::log2(tensor) + 0.15 * std::log2(context)) * (float8 ? 0.8 : 1) *
                        (recompute == "\"full\""        ? 1.33
                         : recompute == "\"selective\"" ? layers_work
                         : by_op                        ? op_work
                                                        : 1);
    const double exposed = tensor > 1 ? micro_batch * (asynchronous ? 0.02 : 0.1) : 0;
    const std::string reshard = values["parallelism.fsdp_reshard_after_forward"];
    const double gather = exchange * std::log2(replicas / replicate * context) *
                          (reshard == "\"" + neighbors + "\"" ? neighbors_gain : 1) *
                          (values.contains("quantize.linear.float8.enable_fsdp_float8_all_gather") ? 0.9 : 1),
                 sum = 0.3 * exchange * std::log2(replicate);
    const double activation = activation_bytes * micro_batch / (tensor * context) *
                              (recompute == "\"full\""        ? 0.1
                               : recompute == "\"selective\"" ? layers_bytes
                               : by_op                        ? op_bytes
                                                              : 1);
    const double parameters = layers * kParametersOfLayer + kParametersOfEnds;
    PlanAnswer answer{.tokens = 1, .parameters = parameters};
    const double computing = work + fixed_s;
    const double shard = parameters * replicate / world;
    double activations = 0, gathered = 0, whole_gradients = 0;
    if (depth == 1) {
      // Half of a gather is the forward's, and half the backward's.
      const double exchanges = keeps ? 0.5 : micro_batches;
      answer.step_s = layers * (micro_batches * (computing + exposed) + exchanges * gather + sum);
      activations = layers * activation;
      gathered = keeps ? parameters / tensor : 0;
      whole_gradients = micro_batches > 1 ? gathered : 0;
    } else {
      const std::string quoted = values["parallelism.pipeline_parallel_schedule"];
      const double stages = layers / number("parallelism.pipeline_parallel_layers_per_stage");
      const auto [time, live] = run_schedule(quoted.substr(1, quoted.size() - 2), static_cast<int>(depth),
                                             static_cast<int>(stages), static_cast<int>(micro_batches));
      answer.step_s = time * layers / stages * (computing + exposed) + 0.01 * layers / depth * (gather + sum);
      activations = live * layers / stages * activation;
      if (pipeline::schedule_traits(quoted.substr(1, quoted.size() - 2)).splits_backward)
        activations *= delayed_bytes;
      gathered = whole_gradients = parameters / tensor / depth;
    }
    const auto set = [&](plan::Category category, double bytes) {
      answer.most_bytes[static_cast<size_t>(category)] = static_cast<int64_t>(bytes);
    };
    set(plan::Category::Parameters, 4 * shard);
    set(plan::Category::Optimizer, 8 * shard);
    set(plan::Category::Gradients, 4 * shard + 4 * whole_gradients);
    set(plan::Category::Gathered, 2 * gathered);
    set(plan::Category::Activations, activations);
    answer.seconds[static_cast<size_t>(plan::Activity::Compute)] = layers * micro_batches * computing / depth;
    answer.saved_bytes = static_cast<int64_t>(activations);
    answer.peak_bytes = answer.needed_bytes = plan::total(answer.most_bytes);
    if (request.stops_above > 0 && answer.needed_bytes > request.stops_above)
      return {.share_rehearsed = 0.5, .needed_bytes = request.stops_above + 1};
    return answer;
  }

  PlanOne one() const {
    return [this](const PlanRequest& request) { return plan(request); };
  }
  Planner planner() const { return one_by_one(one()); }
};

SearchOptions options_for(const FakeCluster& cluster) {
  return {.world = kWorld,
          .sequences = kSequences,
          .usable_bytes = static_cast<int64_t>(cluster.usable_bytes),
          .max_tensor = 8,
          .max_context = 2,
          .max_pipeline = 8,
          .may_use_float8 = true};
}

/// `plan`, but jobs with such a setting have an error.
PlanOne refusing(const PlanOne& plan, const std::string& key, const std::string& value,
                 bool has_failed = false) {
  return [=](const PlanRequest& request) {
    for (const Layout::Setting& setting : request.settings)
      if (setting.key == key && setting.value == value)
        return PlanAnswer{.error = key + " isn't possible", .has_failed = has_failed};
    return plan(request);
  };
}

SearchResult search_with(const FakeCluster& cluster, const SearchOptions& options) {
  return search_layouts(searched_job(), options, cluster.planner(), [](const std::string&) {});
}

std::vector<int64_t> powers(int64_t most) {
  std::vector<int64_t> result;
  for (int64_t power = 1; power <= most; power *= 2) result.push_back(power);
  return result;
}

/// Calls `each` for all layouts within the options' limits, also those that the search leaves out.
template <class Each>
void for_each_layout(const SearchOptions& options, const Each& each) {
  const auto policies = [&](Layout layout) {
    for (const char* recompute : {"none", "selective", "op", "full"})
      for (int bits = 0; bits < 8; ++bits) {
        layout.recompute = recompute;
        layout.float8 = (bits & 1) != 0;
        layout.asynchronous = (bits & 2) != 0;
        layout.keeps_gathered = (bits & 4) != 0;
        if ((layout.asynchronous && layout.tensor == 1) || (layout.keeps_gathered && layout.pipeline > 1))
          continue;
        each(layout);
      }
  };
  for (const int64_t tensor : powers(options.max_tensor))
    for (const int64_t context : powers(options.max_context))
      for (const int64_t pipeline : powers(options.max_pipeline)) {
        const int64_t replicas = kWorld / (tensor * context * pipeline);
        if (replicas == 0) continue;
        for (const int64_t replicate : powers(replicas))
          for (const int64_t micro_batch : powers(kSequences / replicas)) {
            Layout layout{.tensor = tensor,
                          .context = context,
                          .pipeline = pipeline,
                          .replicate = replicate,
                          .schedule = "",
                          .micro_batch = micro_batch};
            const int64_t micro_batches = kSequences / replicas / micro_batch;
            if (pipeline == 1) {
              policies(layout);
              continue;
            }
            for (const auto& traits : pipeline::all_schedule_traits())
              for (const int64_t stages : powers(kNumLayers / pipeline)) {
                if (pipeline::counts_problem(traits, static_cast<int>(pipeline),
                                             static_cast<int>(pipeline * stages),
                                             static_cast<int>(micro_batches)))
                  continue;
                layout.schedule = traits.name;
                layout.stages_of_rank = stages;
                policies(layout);
              }
          }
      }
}

struct True {
  Layout layout;
  double value = std::numeric_limits<double>::infinity();
};

True best_of_all(const FakeCluster& cluster, const SearchOptions& options) {
  True best;
  for_each_layout(options, [&](const Layout& layout) {
    const PlanAnswer plan = cluster.plan({layout.settings(kWorld, kSequences, kNumLayers), kWorld});
    const double value = options.least_memory ? static_cast<double>(plan.needed_bytes) : plan.step_s;
    if (plan.needed_bytes <= options.usable_bytes && value < best.value) best = {layout, value};
  });
  return best;
}

SearchResult expect_the_best(const FakeCluster& cluster, SearchOptions options) {
  options.seconds = 1e6;
  const SearchResult result = search_with(cluster, options);
  const True best = best_of_all(cluster, options);
  EXPECT_FALSE(result.best.empty());
  if (result.best.empty()) return result;
  const PlanAnswer& plan = result.best[0].plan;
  const double value = options.least_memory ? static_cast<double>(plan.needed_bytes) : plan.step_s;
  EXPECT_LE(value, best.value * (1 + 1e-9))
      << result.best[0].layout.text() << " instead of " << best.layout.text();
  EXPECT_FALSE(result.time_is_up);
  EXPECT_EQ(result.num_left, 0U);
  return result;
}

TEST(PlanSearch, FindsTheFastestOfAllLayouts) {
  const FakeCluster clusters[] = {
      {}, {.exchange = 2, .usable_bytes = 25e9}, {.exchange = 2, .usable_bytes = 200e9, .fixed_s = 0.5}};
  for (const FakeCluster& cluster : clusters) {
    SCOPED_TRACE(str("exchange ", cluster.exchange, ", ", cluster.usable_bytes, " bytes"));
    expect_the_best(cluster, options_for(cluster));
  }
}

// Either selection of what is recomputed may be faster, and either may take less memory.
TEST(PlanSearch, TriesBothSelectionsOfRecomputation) {
  for (const double usable_bytes : {15e9, 25e9, 40e9, 60e9}) {
    const FakeCluster longer{.usable_bytes = usable_bytes, .layers_work = 1.2, .op_work = 1.05};
    const FakeCluster larger{.usable_bytes = usable_bytes, .layers_bytes = 0.4, .op_bytes = 0.6};
    for (const FakeCluster* cluster : {&longer, &larger}) {
      SCOPED_TRACE(str(usable_bytes, " bytes, ", cluster->op_work, " of the work"));
      expect_the_best(*cluster, options_for(*cluster));
    }
  }
}

TEST(PlanSearch, SelectsLayersAsTheConfigDoes) {
  const FakeCluster cluster{.usable_bytes = 25e9};
  const auto policies = [&](const char* option) {
    std::set<std::string> found;
    SearchOptions options = options_for(cluster);
    options.num_best = 100000;
    options.max_tensor = options.max_pipeline = 2;
    for (const FoundLayout& each :
         search_layouts(searched_job(option), options, cluster.planner(), [](const std::string&) {}).best)
      found.insert(each.layout.recompute);
    return found;
  };
  EXPECT_THAT(policies("op"), AllOf(Contains("op"), Not(Contains("selective"))));
  EXPECT_THAT(policies("3"), AllOf(Contains("op"), Contains("selective")));
  EXPECT_THAT(policies("33"), Not(Contains("selective"))) << "the model has 32 layers";
}

TEST(PlanSearch, FindsTheSmallestOfAllLayouts) {
  const FakeCluster cluster;
  SearchOptions options = options_for(cluster);
  options.least_memory = true;
  const SearchResult result = expect_the_best(cluster, options);
  for (size_t i = 1; i < result.best.size(); ++i)
    EXPECT_GE(result.best[i].plan.needed_bytes, result.best[i - 1].plan.needed_bytes);
}

TEST(PlanSearch, TriesReplicasOfParametersAndLargeMicroBatches) {
  const FakeCluster slow_network{.exchange = 2, .usable_bytes = 1000e9};
  EXPECT_GT(expect_the_best(slow_network, options_for(slow_network)).best[0].layout.replicate, 1);
  const FakeCluster slow_start{.usable_bytes = 10000e9, .fixed_s = 5};
  SearchOptions options = options_for(slow_start);
  options.tensor = 8;
  EXPECT_GT(search_with(slow_start, options).best[0].layout.micro_batch, 8);
}

// Also in a step of one micro-batch, whose gradients are never whole: they would not fit.
TEST(PlanSearch, TriesParametersThatStayGathered) {
  const FakeCluster cluster{.exchange = 2, .usable_bytes = 50e9, .activation_bytes = 0.3e9};
  SearchOptions options = options_for(cluster);
  options.tensor = options.context = options.pipeline = options.replicate = 1;
  options.may_use_float8 = false;
  for (const int64_t rows : {1, 2}) {
    options.sequences = rows * kWorld;
    const FoundLayout best = search_with(cluster, options).best[0];
    EXPECT_TRUE(best.layout.keeps_gathered) << best.layout.text();
    EXPECT_EQ(best.layout.recompute, "none");
    EXPECT_EQ(best.layout.micro_batch, rows) << "several micro-batches would take whole gradients";
  }
  // Also where the number of copies is given.
  const FakeCluster larger{.exchange = 2, .usable_bytes = 200e9, .activation_bytes = 0.3e9};
  options = options_for(larger);
  options.tensor = options.context = options.pipeline = 1;
  options.replicate = 2;
  EXPECT_TRUE(search_with(larger, options).best[0].layout.keeps_gathered);
}

TEST(PlanSearch, TriesEverySchedule) {
  const FakeCluster cluster{.usable_bytes = 1000e9};
  SearchOptions options = options_for(cluster);
  options.pipeline = 4;
  options.max_tensor = options.max_context = 1;
  options.num_best = 100000;
  std::map<std::string, int> schedules;
  for (const FoundLayout& found : search_with(cluster, options).best) ++schedules[found.layout.schedule];
  for (const std::string& name : pipeline::schedule_names()) EXPECT_GT(schedules[name], 0) << name;
}

// No other layout gathers less often.
TEST(PlanSearch, TriesVariantsOfTheBestLayout) {
  SearchOptions options = options_for({});
  options.tensor = options.context = options.pipeline = options.replicate = 1;
  options.may_use_float8 = false;
  const SearchResult without = search_with({}, options);
  for (const FoundLayout& found : without.best)
    EXPECT_FALSE(found.layout.is_variant()) << found.layout.text();
  const FakeCluster cluster{.usable_bytes = 10e9, .activation_bytes = 0.1e9, .neighbors_gain = 0.7};
  options.usable_bytes = 10e9;
  const SearchResult found = search_with(cluster, options);
  EXPECT_EQ(found.best[0].layout.reshard, 8) << found.best[0].layout.text();
  EXPECT_THAT(found.best[0].layout.text(), HasSubstr("sharded over 8 after the forward"));
  options.may_use_float8 = true;
  EXPECT_THAT(search_with({.usable_bytes = 10e9, .activation_bytes = 0.1e9}, options).best[0].layout.text(),
              HasSubstr("Float8, also gathers"));
}

TEST(PlanSearch, PlansFewOfTheLayouts) {
  const FakeCluster cluster;
  const SearchResult result = search_with(cluster, options_for(cluster));
  EXPECT_GT(result.num_layouts, 3000U);
  EXPECT_LE(result.num_estimated, result.num_layouts);
  EXPECT_LT(cluster.num_plans, result.num_layouts / 4);
  EXPECT_EQ(result.best.size(), 10U);
  for (size_t i = 0; i < result.best.size(); ++i) {
    EXPECT_LE(static_cast<double>(result.best[i].plan.needed_bytes), cluster.usable_bytes);
    if (i > 0) EXPECT_GE(result.best[i].plan.step_s, result.best[i - 1].plan.step_s);
  }
}

TEST(PlanSearch, KeepsToGivenAndLargestDegrees) {
  const FakeCluster cluster;
  SearchOptions options = options_for(cluster);
  options.max_tensor = 2;
  options.context = 2;
  options.max_pipeline = 1;
  options.replicate = 2;
  options.may_use_float8 = false;
  const SearchResult result = search_with(cluster, options);
  ASSERT_FALSE(result.best.empty());
  for (const FoundLayout& found : result.best) {
    EXPECT_LE(found.layout.tensor, 2);
    EXPECT_EQ(found.layout.context, 2);
    EXPECT_EQ(found.layout.pipeline, 1);
    EXPECT_EQ(found.layout.replicate, 2);
    EXPECT_FALSE(found.layout.float8);
  }
}

TEST(PlanSearch, SaysWhatIsLeftWhenTimeIsUp) {
  const FakeCluster cluster{.usable_bytes = 1000e9};
  SearchOptions options = options_for(cluster);
  options.seconds = 0;  // some blocks are planned all the same
  const SearchResult few = search_with(cluster, options);
  EXPECT_TRUE(few.time_is_up);
  EXPECT_EQ(few.num_planned, 1U);
  EXPECT_GT(few.num_left, 1000U);
  // Time for all blocks, but for one plan only.
  options.seconds = 1e6;
  const Planner slow = one_by_one([&](const PlanRequest& request) {
    if (!is_block(request)) options.seconds = 0;
    return cluster.plan(request);
  });
  const SearchResult some = search_layouts(searched_job(), options, slow, [](const std::string&) {});
  EXPECT_TRUE(some.time_is_up);
  EXPECT_GT(some.num_left, 0U);
  EXPECT_EQ(some.num_planned, 1U);
  EXPECT_FALSE(some.best.empty());
}

// Where weight gradients are delayed, layouts take up to twice the memory of their estimates, and by these they are the fastest.
TEST(PlanSearch, PlansFirstWhatFits) {
  const FakeCluster cluster{.usable_bytes = 40e9, .fixed_s = 0, .delayed_bytes = 2};
  SearchOptions options = options_for(cluster);
  options.may_use_float8 = false;
  options.pipeline = 4;
  options.seconds = 1e6;
  const double fastest_s = search_with(cluster, options).best[0].plan.step_s;
  int num_plans = 0;
  const Planner planner = one_by_one([&](const PlanRequest& request) {
    if (!is_block(request) && ++num_plans == 8) options.seconds = 0;
    return cluster.plan(request);
  });
  const SearchResult result = search_layouts(searched_job(), options, planner, [](const std::string&) {});
  EXPECT_EQ(result.num_planned, 8U);
  EXPECT_GT(result.num_left, 0U);
  EXPECT_LE(result.num_too_large, 3U);
  ASSERT_FALSE(result.best.empty());
  EXPECT_LE(result.best[0].plan.step_s, 1.05 * fastest_s) << result.best[0].layout.text();
}

// Estimates leave out what delayed weight gradients keep, so they show neither that a layout fits easily nor what the others must beat.
TEST(PlanSearch, FindsTheFastestWhereEstimatesOfMemoryAreTooSmall) {
  for (const double usable_bytes : {20e9, 30e9, 40e9, 60e9}) {
    SCOPED_TRACE(str(usable_bytes, " bytes"));
    const FakeCluster cluster{.usable_bytes = usable_bytes, .fixed_s = 0, .delayed_bytes = 2};
    expect_the_best(cluster, options_for(cluster));
  }
}

TEST(PlanSearch, EndsPlansOfWhatDoesNotFit) {
  const FakeCluster cluster{.usable_bytes = 40e9, .fixed_s = 0, .delayed_bytes = 2};
  const SearchOptions options = options_for(cluster);
  const Planner planner = one_by_one([&](const PlanRequest& request) {
    EXPECT_EQ(request.only_first_rank, is_block(request));
    EXPECT_EQ(request.stops_above, is_block(request) ? 0 : options.usable_bytes);
    return cluster.plan(request);
  });
  const SearchResult result = search_layouts(searched_job(), options, planner, [](const std::string&) {});
  EXPECT_GT(result.num_too_large, 0U);
  EXPECT_TRUE(result.smallest.is_least);
  for (const FoundLayout& found : result.best) EXPECT_GT(found.plan.step_s, 0);
}

// Also replicas of parameters for whose sharded layout there was no time.
TEST(PlanSearch, CountsEveryLayoutThatItHadNoTimeFor) {
  const FakeCluster cluster{.usable_bytes = 1e15, .fixed_s = 5};  // where everything may be among the best
  SearchOptions options = options_for(cluster);
  options.only_degrees = true;
  options.max_pipeline = 1;
  options.num_best = 100000;
  options.seconds = 0;
  const SearchResult result = search_with(cluster, options);
  EXPECT_EQ(result.num_planned, 1U);
  EXPECT_EQ(result.num_left + result.num_planned, result.num_layouts);
}

// A plan takes 50 s whatever it plans, and 1 s a micro-batch, so by the time of the fastest layout's only one, the others' four take 204 s.
TEST(PlanSearch, HasTimeForLongPlansAfterShortOnes) {
  const FakeCluster cluster{.usable_bytes = 1000e9};
  SearchOptions options = options_for(cluster);
  options.sequences = 4 * kWorld;
  options.tensor = options.context = options.pipeline = options.replicate = 1;
  options.may_use_float8 = false;
  options.num_at_once = 1;
  options.host_devices = kWorld;  // no variants
  options.seconds = 100;
  const Planner planner = one_by_one([&](const PlanRequest& request) {
    PlanAnswer answer = cluster.plan(request);
    for (const Layout::Setting& setting : request.settings)
      if (setting.key == "local_batch_size") answer.planning_s = 50 + 4 / std::stod(setting.value);
    return answer;
  });
  const SearchResult result = search_layouts(searched_job(), options, planner, [](const std::string&) {});
  EXPECT_FALSE(result.time_is_up);
  EXPECT_EQ(result.num_left, 0U);
  EXPECT_EQ(result.num_planned, result.num_estimated);
  EXPECT_GT(result.num_planned, 3U);  // that is, also those of more than one micro-batch
}

std::string search_error(const SearchOptions& options, const Planner& planner) {
  try {
    search_layouts(searched_job(), options, planner, [](const std::string&) {});
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(PlanSearch, SaysWhyThereIsNoLayout) {
  const FakeCluster cluster;
  SearchOptions options = options_for(cluster);
  const Planner refusing =
      one_by_one([](const PlanRequest&) { return PlanAnswer{.error = "no GPU is that large"}; });
  EXPECT_THAT(
      search_error(options, refusing),
      AllOf(HasSubstr("no layout can be planned\nlayouts that the program refused: "),
            HasSubstr("; the last one: "), HasSubstr(": no GPU is that large"), Not(HasSubstr("error"))));
  options.sequences = 7;
  options.max_tensor = options.max_context = options.max_pipeline = 1;
  const auto error = [&](const SearchOptions& given) { return search_error(given, cluster.planner()); };
  EXPECT_THAT(error(options),
              HasSubstr("no layout of 16 ranks that is allowed shares 7 sequences a step equally"));
  options.tensor = options.pipeline = 8;
  EXPECT_THAT(error(options),
              HasSubstr("parallelism.tensor_parallel_degree x parallelism.pipeline_parallel_degree = "
                        "8 x 8 doesn't divide the 16 ranks"));
  options.pipeline = 0;
  options.tensor = 16;
  EXPECT_THAT(error(options),
              HasSubstr("parallelism.tensor_parallel_degree = 16 doesn't divide the model's 32 heads "
                        "and 8 key/value heads"));
  options = options_for(cluster);
  options.replicate = 4;
  options.shard = 8;
  EXPECT_THAT(error(options), HasSubstr("parallelism.data_parallel_replicate_degree x "
                                        "parallelism.data_parallel_shard_degree = 4 x 8 doesn't divide"));
}

TEST(PlanSearch, SaysIfNoDegreesFillTheRanks) {
  const FakeCluster cluster;
  SearchOptions options = options_for(cluster);
  options.replicate = options.shard = options.context = options.pipeline = 1;
  options.sequences = 16;
  options.max_tensor = 16;  // and the model has 8 key/value heads
  EXPECT_THAT(search_error(options, cluster.planner()),
              AllOf(HasSubstr("parallelism.data_parallel_shard_degree x"),
                    HasSubstr("= 1 x 1 x 1 x 1: no other degrees that are allowed fill 16 ranks")));
}

TEST(PlanSearch, KeepsAGivenDegreeOfShards) {
  const FakeCluster cluster;
  SearchOptions options = options_for(cluster);
  options.only_degrees = true;
  options.replicate = options.shard = 2;
  const SearchResult result = search_with(cluster, options);
  ASSERT_FALSE(result.best.empty());
  for (const FoundLayout& found : result.best)
    EXPECT_EQ(found.layout.tensor * found.layout.context * found.layout.pipeline, kWorld / 4)
        << found.layout.text();
}

// Without any full plan, because the estimates are too large already, also if some layouts are refused.
TEST(PlanSearch, FindsTheSmallestWhenNothingFits) {
  const FakeCluster cluster{.usable_bytes = 1e9};
  SearchOptions options = options_for(cluster);
  options.replicate = 1;
  for (const int64_t largest_context : {2, 1}) {
    const Planner planner = one_by_one(
        largest_context == 2 ? cluster.one() : refusing(cluster.one(), "context_parallel_degree", "2"));
    const SearchResult result = search_layouts(searched_job(), options, planner, [](const std::string&) {});
    EXPECT_TRUE(result.best.empty());
    EXPECT_EQ(result.num_left, 0U);
    EXPECT_EQ(result.num_planned, 0U);
    double least = std::numeric_limits<double>::infinity();
    for_each_layout(options, [&](const Layout& layout) {
      if (layout.replicate > 1 || layout.context > largest_context) return;
      const PlanAnswer plan = cluster.plan({layout.settings(kWorld, kSequences, kNumLayers), kWorld});
      least = std::min(least, static_cast<double>(plan.needed_bytes));
    });
    EXPECT_NEAR(result.smallest.bytes, least, 0.2 * least) << result.smallest.layout.text();
  }
}

TEST(PlanSearch, CountsWhatWasRefusedAndWhatFailed) {
  const FakeCluster cluster;
  PlanOne plan = refusing(cluster.one(), "context_parallel_degree", "2");
  plan = refusing(plan, "mode", "\"full\"", /*has_failed=*/true);
  SearchOptions options = options_for(cluster);
  options.usable_bytes = static_cast<int64_t>(30e9);
  const SearchResult result =
      search_layouts(searched_job(), options, one_by_one(plan), [](const std::string&) {});
  EXPECT_FALSE(result.best.empty());
  EXPECT_GT(result.refused.num, 10U);
  EXPECT_THAT(result.refused.last,
              AllOf(HasSubstr("CP 2"), HasSubstr("context_parallel_degree isn't possible")));
  EXPECT_GT(result.failed.num, 10U);
  EXPECT_THAT(result.failed.last, AllOf(HasSubstr("recompute full"), HasSubstr("mode isn't possible")));
  EXPECT_THAT(
      unplanned_text(result),
      AllOf(HasSubstr(str("layouts that the program refused: ", result.refused.num, "; the last one: ")),
            HasSubstr(str("because of an error: ", result.failed.num, "; the last one: "))));
}

}  // namespace
}  // namespace titan::train
