// titan plan: what a job takes on any number of GPUs, from a rehearsal of one rank of each role.

#include <sys/prctl.h>
#include <unistd.h>
#include <algorithm>
#include <cmath>
#include <csignal>
#include <iostream>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include <ATen/Parallel.h>
#include <c10/util/StringUtil.h>
#include <nlohmann/json.hpp>

#include "cli/launch/launch.h"
#include "cli/plan_command.h"
#include "cli/plan_pictures.h"
#include "cli/text.h"
#include "core/file.h"
#include "core/units.h"
#include "dist/device_backend.h"
#include "job/job_config.h"
#include "job/job_plan.h"
#include "plan/calibrate.h"
#include "plan/device_file.h"
#include "titan/config/load.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/world.h"

namespace titan::cli {

namespace {

using nlohmann::json;
using plan::Category;

constexpr size_t kMostRows = 12;  // in a table of modules or operations

double gib(int64_t bytes) { return static_cast<double>(bytes) / kGiB; }
std::string gib_text(int64_t bytes) { return number("%.2f", gib(bytes)); }

struct Plan {
  const train::JobConfig& config;
  const PlanArguments& arguments;
  train::JobPlan job;
  std::vector<std::string> notes = {};
};

// ---- JSON

json categories_json(const plan::BytesByCategory& bytes) {
  json object = json::object();
  for (int i = 0; i < plan::kNumCategories; ++i)
    object[name_of(static_cast<Category>(i))] = bytes[static_cast<size_t>(i)];
  return object;
}

json point_json(const plan::MemoryPoint& point) {
  return {{"entry", point.entry},
          {"step", point.step},
          {"module", point.module},
          {"bytes", plan::total(point.bytes)},
          {"categories", categories_json(point.bytes)}};
}

json memory_json(const train::PlannedRole& role) {
  json modules = json::array(), over_time = json::array();
  for (const plan::NamedAmount& owner : role.summary.peak_by_module)
    modules.push_back({{"module", owner.name}, {"bytes", owner.bytes}});
  for (const plan::MemoryPoint& point : role.summary.over_time) over_time.push_back(point_json(point));
  json by_module = json::array();
  for (const plan::ModuleMemory& memory : role.summary.by_module) {
    json changes = json::array();
    for (const auto& [point, bytes] : memory.changes) changes.push_back({point, bytes});
    by_module.push_back(
        {{"module", memory.module}, {"category", name_of(memory.category)}, {"changes", std::move(changes)}});
  }
  return {{"role", role.rank.role.name},
          {"rank", role.rank.role.rank},
          {"peak_gib", gib(role.rank.peak_reserved_bytes)},
          {"peak_reserved_bytes", role.rank.peak_reserved_bytes},
          {"peak_allocated_bytes", role.rank.peak_allocated_bytes},
          {"shard_gradient_bytes", role.rank.shard_gradient_bytes},
          {"nccl_bytes", role.outside.nccl_bytes},
          {"symmetric_memory_bytes", role.outside.symmetric_bytes},
          {"communicators", role.outside.communicators},
          {"at_peak", point_json(role.summary.peak)},
          {"at_peak_by_module", modules},
          {"after_step", categories_json(role.summary.after_step)},
          {"over_time", over_time},
          {"backward_point", role.summary.backward_point},
          {"by_module", by_module}};
}

json step_json(const train::PlannedRole& role) {
  return {{"role", role.rank.role.name},
          {"rank", role.rank.role.rank},
          {"launches", role.summary.num_launches},
          {"allocations", role.summary.num_allocations},
          {"flops", role.summary.flops}};
}

json calls_json(const std::vector<plan::CollectiveTotals::Call>& calls) {
  json rows = json::array();
  for (const auto& [module, bytes, number] : calls)
    rows.push_back({{"module", module}, {"bytes", bytes}, {"calls", number}});
  return rows;
}

void add_collectives(const train::PlannedRole& role, json& rows) {
  for (const plan::CollectiveTotals& totals : role.summary.collectives)
    rows.push_back({{"role", role.rank.role.name},
                    {"op", totals.op},
                    {"group", totals.group},
                    {"group_size", totals.group_size},
                    {"label", totals.label},
                    {"stream", role.stream_name(totals.stream)},
                    {"calls", totals.calls},
                    {"bytes", totals.bytes},
                    {"each", calls_json(totals.each)}});
}

void add_operations(const train::PlannedRole& role, json& rows) {
  for (const plan::LaunchTotals& totals : role.summary.launches)
    rows.push_back({{"role", role.rank.role.name},
                    {"operation", totals.name},
                    {"launches", totals.launches},
                    {"flops", totals.flops},
                    {"bytes_read", totals.bytes_read},
                    {"bytes_written", totals.bytes_written}});
}

json time_json(const plan::StepTime::OfRank& rank) {
  json object = json::object();
  for (int i = 0; i < plan::kNumActivities; ++i)
    object[name_of(static_cast<plan::Activity>(i))] = rank.seconds[static_cast<size_t>(i)];
  object["communicating"] = rank.communicating;
  object["products"] = rank.products;
  object["attention"] = rank.attention;
  return object;
}

json to_json(const Plan& plan) {
  json memory = {{"peak_gib", gib(plan.job.peak_bytes())},
                 {"outside_gib", gib(plan.job.largest().outside.bytes())},
                 {"usable_gib", gib(plan.job.cluster.device.usable_bytes())},
                 {"by_role", json::array()}};
  json steps = json::array(), collectives = json::array(), operations = json::array(),
       time_by_role = json::array();
  for (size_t i = 0; i < plan.job.step.ranks.size(); ++i) {
    time_by_role.push_back(time_json(plan.job.step.ranks[i]));
    time_by_role.back()["role"] = plan.job.roles[i].rank.role.name;
  }
  for (const train::PlannedRole& role : plan.job.roles) {
    memory["by_role"].push_back(memory_json(role));
    steps.push_back(step_json(role));
    add_collectives(role, collectives);
    add_operations(role, operations);
  }
  return {{"model", plan.config.model_title()},
          {"world", plan.arguments.world_size},
          {"device", plan.job.cluster.device.name},
          {"assumed", plan.job.cluster.assumed},
          {"notes", plan.notes},
          {"fits", plan.job.fits()},
          {"step_s", plan.job.step.seconds},
          {"tokens_per_s_per_device", plan.job.tokens_per_s_per_device()},
          {"mfu", plan.job.mfu()},
          {"time", time_json(plan.job.busiest())},
          {"time_by_role", time_by_role},
          {"memory", memory},
          {"step", steps},
          {"collectives", collectives},
          {"operations", operations}};
}

// ---- the table

std::string memory_table(const Plan& plan) {
  TextTable table;
  table.rows = {{"GiB of a rank", "from the device", "in tensors"}};
  table.right = {false};
  for (int i = 0; i < plan::kNumCategories; ++i)
    table.rows[0].emplace_back(name_of(static_cast<Category>(i)));
  table.right.resize(table.rows[0].size(), true);
  for (const train::PlannedRole& role : plan.job.roles) {
    std::vector<std::string> row = {role.rank.role.name, gib_text(role.rank.peak_reserved_bytes),
                                    gib_text(role.rank.peak_allocated_bytes)};
    for (const int64_t bytes : role.summary.peak.bytes) row.push_back(gib_text(bytes));
    table.rows.push_back(std::move(row));
  }
  return to_string(table);
}

std::string time_table(const train::JobPlan& job) {
  TextTable table{{{"ms of a step"}}, {false}};
  for (int i = 0; i < plan::kNumActivities; ++i)
    table.rows[0].emplace_back(name_of(static_cast<plan::Activity>(i)));
  table.rows[0].emplace_back("communicating");
  table.right.resize(table.rows[0].size(), true);
  for (size_t r = 0; r < job.step.ranks.size(); ++r) {
    std::vector<std::string> row = {job.roles[r].rank.role.name};
    for (const double seconds : job.step.ranks[r].seconds) row.push_back(number("%.1f", 1e3 * seconds));
    row.push_back(number("%.1f", 1e3 * job.step.ranks[r].communicating));
    table.rows.push_back(std::move(row));
  }
  return to_string(table);
}

std::string modules_table(const train::PlannedRole& role) {
  TextTable table{{{"allocated in", "GiB at the peak"}}, {false, true}};
  const auto& owners = role.summary.peak_by_module;
  int64_t all = 0, others = 0;
  for (size_t i = 0; i < owners.size(); ++i) {
    all += owners[i].bytes;
    if (i < kMostRows)
      table.rows.push_back(
          {owners[i].name.empty() ? "(outside any module)" : owners[i].name, gib_text(owners[i].bytes)});
    else
      others += owners[i].bytes;
  }
  if (owners.size() > kMostRows)
    table.rows.push_back({plural(owners.size() - kMostRows, "other"), gib_text(others)});
  table.rows.push_back({"all", gib_text(all)});
  return to_string(table);
}

std::string collectives_table(const train::PlannedRole& role) {
  if (role.summary.collectives.empty()) return "no collectives\n";
  TextTable table{{{"collective", "group", "ranks", "stream", "calls", "GiB"}},
                  {false, false, true, false, true, true}};
  for (const plan::CollectiveTotals& totals : role.summary.collectives)
    table.rows.push_back({totals.label.empty() ? totals.op : totals.label + " (" + totals.op + ")",
                          totals.group, str(totals.group_size), role.stream_name(totals.stream),
                          str(totals.calls), gib_text(totals.bytes)});
  return to_string(table);
}

std::string operations_table(const train::PlannedRole& role) {
  std::vector<plan::LaunchTotals> largest = role.summary.launches;
  std::ranges::stable_sort(largest, std::greater<>(), [](const plan::LaunchTotals& totals) {
    return std::pair(totals.flops, totals.bytes_read + totals.bytes_written);
  });
  TextTable table{{{"operation", "launches", "TFLOP", "GiB read", "GiB written"}},
                  {false, true, true, true, true}};
  for (const plan::LaunchTotals& totals : largest) {
    if (table.rows.size() == kMostRows) break;
    table.rows.push_back(
        {totals.name, str(totals.launches), totals.flops > 0 ? number("%.2f", 1e-12 * totals.flops) : "",
         number("%.2f", totals.bytes_read / kGiB), number("%.2f", totals.bytes_written / kGiB)});
  }
  if (largest.size() > kMostRows) {
    const auto rest = std::span(largest).subspan(kMostRows);
    const auto num_launches =
        std::accumulate(rest.begin(), rest.end(), int64_t{0},
                        [](int64_t sum, const plan::LaunchTotals& totals) { return sum + totals.launches; });
    table.rows.push_back({plural(rest.size(), "other"), str(num_launches), "", "", ""});
  }
  table.rows.push_back(
      {"all", str(role.summary.num_launches), number("%.2f", 1e-12 * role.summary.flops), "", ""});
  return to_string(table);
}

// ---- what would make it fit

struct Change {
  std::vector<std::string> words;  ///< settings of the command line
  train::JobPlan plan;
};

using Words = std::vector<std::string>;

std::vector<Words> more_recomputation(const train::JobConfig& config) {
  const std::string& mode = config.activation_checkpoint.mode;
  const bool selects_op = config.activation_checkpoint.selective_ac_option == "op";
  std::vector<Words> changes;
  if (mode == "none" && !selects_op) changes.push_back({"--activation_checkpoint.mode=selective"});
  if (mode == "none" || (mode == "selective" && !selects_op))
    changes.push_back(
        {"--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"});
  if (mode != "full") changes.push_back({"--activation_checkpoint.mode=full"});
  return changes;
}

// Other changes of one thing that take less memory, each in steps of which the first that fits is the fastest.
std::vector<std::vector<Words>> smaller_jobs(const train::JobConfig& config, int world_size) {
  const train::ParallelismSettings& parallelism = config.parallelism;
  const bool has_pipeline = parallelism.pipeline_parallel_degree > 1;
  std::vector<std::vector<Words>> changes;
  const auto smaller_batch = [&](const char* key, int64_t batch, int64_t sequences) {
    std::vector<Words>& steps = changes.emplace_back();
    for (int64_t size = batch - 1; size > 0; --size)
      if (sequences % size == 0) steps.push_back({str("--", key, "=", size)});
  };
  const int64_t local_batch = config.training.local_batch_size;
  if (has_pipeline)
    smaller_batch("parallelism.pipeline_parallel_microbatch_size",
                  parallelism.pipeline_parallel_microbatch_size, local_batch);
  else
    smaller_batch("training.local_batch_size", local_batch,
                  sequences_of(config, world_size) * parallelism.tensor_parallel_degree *
                      parallelism.context.degree / world_size);
  if (parallelism.data_parallel_replicate_degree > 1)
    changes.push_back(
        {{"--parallelism.data_parallel_replicate_degree=1", "--parallelism.data_parallel_shard_degree=-1"}});
  if (parallelism.fsdp_reshard_after_forward != "always")
    changes.push_back({{"--parallelism.fsdp_reshard_after_forward=always"}});
  if (!parallelism.fsdp_reduce_every_micro_batch && !has_pipeline)
    changes.push_back({{"--parallelism.fsdp_reduce_every_micro_batch=true"}});
  const auto doubled = [&](const char* key, int64_t degree) {
    changes.push_back(
        {{str("--parallelism.", key, "=", 2 * degree), "--parallelism.data_parallel_shard_degree=-1"}});
  };
  if (!config.optimizer.state_dtype) changes.push_back({{"--optimizer.state_dtype=bfloat16"}});
  doubled("tensor_parallel_degree", parallelism.tensor_parallel_degree);
  doubled("context_parallel_degree", parallelism.context.degree);
  doubled("pipeline_parallel_degree", parallelism.pipeline_parallel_degree);
  return changes;
}

constexpr size_t kMostChanges = 3;

// The first step that fits, with as many sequences a step.
std::optional<Change> first_that_fits(const Plan& plan, plan::PlannedGpu& gpu,
                                      const std::vector<Words>& steps) {
  bool is_refused = false;
  const auto planned = [&](Words words) -> std::optional<Change> {
    PlanArguments arguments = plan.arguments;
    // Otherwise the batch of a step would follow the local one, and the number of replicas.
    if (plan.config.training.global_batch_size <= 0)
      words.push_back(str("--training.global_batch_size=", sequences_of(plan.config, arguments.world_size)));
    arguments.overrides.insert(arguments.overrides.end(), words.begin(), words.end());
    try {
      const train::JobConfig config = load_planned_job(arguments);
      train::JobPlan changed = train::plan_job(config, arguments.world_size, plan.job.cluster, gpu,
                                               {.kernels = kernels_of(arguments.kernels)});
      if (changed.fits()) return Change{std::move(words), std::move(changed)};
      is_refused = false;
    } catch (const Error&) {
      is_refused = true;  // or it can't be planned
    }
    return std::nullopt;
  };
  // Each takes less memory than the one before, so the first that fits is found by halves.
  std::optional<Change> found;
  std::vector<Words> left = steps;
  while (!left.empty()) {
    const auto middle = left.begin() + (std::ssize(left) - 1) / 2;
    if (std::optional<Change> change = planned(*middle)) {
      found = std::move(change);
      left.erase(middle, left.end());
    } else {
      left.erase(is_refused ? middle : left.begin(), middle + 1);
    }
  }
  return found;
}

// The fastest of those that fit. If none does, of those that fit with more recomputation.
std::vector<Change> changes_that_fit(const Plan& plan, plan::PlannedGpu& gpu) {
  std::vector<Change> changes;
  const auto try_change = [&](const std::vector<Words>& steps) {
    std::optional<Change> change = first_that_fits(plan, gpu, steps);
    if (change) changes.push_back(std::move(*change));
    return change.has_value();
  };
  const std::vector<Words> recomputation = more_recomputation(plan.config);
  const std::vector<std::vector<Words>> smaller = smaller_jobs(plan.config, plan.arguments.world_size);
  for (const Words& recompute : recomputation) try_change({recompute});
  for (const std::vector<Words>& steps : smaller) try_change(steps);
  if (changes.empty())
    for (const std::vector<Words>& steps : smaller)
      for (auto recompute = recomputation.rbegin(); recompute != recomputation.rend(); ++recompute) {
        std::vector<Words> both = steps;
        for (Words& words : both) words.insert(words.begin(), recompute->begin(), recompute->end());
        if (!try_change(both) && recompute == recomputation.rbegin()) break;  // less doesn't fit, either
      }
  std::ranges::stable_sort(changes, std::greater<>(),
                           [](const Change& change) { return change.plan.tokens_per_s_per_device(); });
  if (changes.size() > kMostChanges) changes.resize(kMostChanges);
  return changes;
}

std::string changes_text(const std::vector<Change>& changes) {
  if (changes.empty())
    return "no doubled degree, smaller batch or other single change makes it fit, with or without more "
           "recomputation; titan plan --search tries all combinations of them\n";
  TextTable table{{{"what makes it fit", "GiB", "tokens/s per device"}}, {false, true, true}};
  for (const Change& change : changes)
    table.rows.push_back({c10::Join(" ", change.words), gib_text(change.plan.needed_bytes()),
                          short_number(std::round(change.plan.tokens_per_s_per_device()))});
  return to_string(table);
}

json changes_json(const std::vector<Change>& changes) {
  json rows = json::array();
  for (const Change& change : changes)
    rows.push_back({{"settings", change.words},
                    {"peak_gib", gib(change.plan.peak_bytes())},
                    {"needed_gib", gib(change.plan.needed_bytes())},
                    {"tokens_per_s_per_device", change.plan.tokens_per_s_per_device()}});
  return rows;
}

std::string assumed_text(const plan::ClusterSpec& cluster) {
  return cluster.assumed.empty()
             ? ""
             : str("assumed, because the device's file leaves it out: ", c10::Join(", ", cluster.assumed),
                   "\n");
}

std::string headline(const Plan& plan) {
  return str(plan.config.model_title(), " on ", plan.arguments.world_size, " x ",
             plan.job.cluster.device.name, ": a step takes ", duration(plan.job.step.seconds), ", ",
             short_number(std::round(plan.job.tokens_per_s_per_device())), " tokens/s per device, MFU ",
             number("%.1f", 100 * plan.job.mfu()), " %");
}

// Nothing of this is the allocator's, so it isn't in the tables.
std::string outside_text(const train::PlannedRole& role) {
  const plan::OutsideMemory& outside = role.outside;
  if (outside.bytes() == 0) return "";
  std::string text = str("about ", gib_text(outside.nccl_bytes), " GiB of that are buffers of NCCL's ",
                         outside.communicators,
                         outside.communicators == 1 ? " communicator" : " communicators", " (an estimate)");
  if (outside.symmetric_bytes > 0)
    text += str(", and ", gib_text(outside.symmetric_bytes), " GiB symmetric memory");
  return text + "\n";
}

std::string to_text(const Plan& plan) {
  const train::PlannedRole& role = plan.job.largest();
  const int64_t usable = plan.job.cluster.device.usable_bytes(), missing = plan.job.needed_bytes() - usable;
  const std::string verdict =
      plan.job.fits() ? str("fits: ", gib_text(plan.job.needed_bytes()), " of ", gib_text(usable), " GiB")
                      : str("doesn't fit: needs ", gib_text(plan.job.needed_bytes()), " of ",
                            gib_text(usable), " GiB, ", gib_text(missing), " GiB short");
  const std::string& module = role.summary.peak.module;
  return str(headline(plan), "\n", verdict, "\n", outside_text(role), assumed_text(plan.job.cluster),
             lines_of(plan.notes), "\n", memory_table(plan), "\n", time_table(plan.job), "\n",
             plan.job.roles.size() > 1 ? role.rank.role.name + " takes most; its" : "the", " peak is in ",
             module.empty() ? "no module" : module, "\n\n", modules_table(role), "\ncollectives of a step\n",
             collectives_table(role), "\nlaunches of a step\n", operations_table(role));
}

}  // namespace

plan::Kernels kernels_of(const std::string& name) {
  if (name == "ours") return plan::Kernels::Ours;
  return name == "compiled" ? plan::Kernels::Compiled : plan::Kernels::Eager;
}

train::JobConfig load_planned_job(const PlanArguments& arguments) {
  train::JobConfig config;
  config::Origins origins =
      config::load(train::job_schema(), {arguments.config, arguments.overrides}, config);
  if (config.training.device == "cpu")
    throw ConfigError(
        origins.problem("training.device", "a plan is for the GPU of --device; leave it at \"auto\""));
  config.training.device = "cuda";
  if (config.compile.enable && plan::load_device(arguments.device).device.is_cpu)
    throw ConfigError(origins.problem(
        "compile.enable", "records steps as CUDA graphs, which the CPU of --device doesn't have"));
  train::check_job(config, origins, arguments.world_size, train::JobFiles::Ignore);
  train::check_plannable(config, origins);
  const train::ModelSizes sizes = config.spec().sizes(config.args());
  if (!sizes.block_causal) return config;
  // The lengths of documents depend on data.
  const std::string causal = "--model.args.attn_mask_type=causal";
  const std::string why = "this model attends within documents, whose lengths a plan doesn't know";
  PlanArguments planned = arguments;
  if (!planned.overrides.empty() && planned.overrides.back() == causal)
    throw ConfigError(str(why, ", also with ", causal));
  if (sizes.eos_id) planned.overrides.emplace_back("--model.args.eos_id=none");
  planned.overrides.push_back(causal);
  try {
    return load_planned_job(planned);
  } catch (const ConfigError& error) {
    throw ConfigError(str(why, "; with ", causal, ": ", error.what()));
  }
}

std::vector<std::string> plan_notes(const train::JobConfig& config) {
  std::vector<std::string> notes;
  if (config.validation.enable)
    notes.emplace_back("validation isn't planned: neither its time nor its memory");
  if (config.spec().sizes(config.args()).block_causal)
    notes.emplace_back(
        "attention within documents is planned as causal attention over whole sequences, which takes as much "
        "memory and more time");
  return notes;
}

std::string lines_of(const std::vector<std::string>& notes) {
  std::string text;
  for (const std::string& note : notes) text += note + "\n";
  return text;
}

train::JobConfig load_for_search(const PlanArguments& arguments) {
  train::JobConfig config;
  config::load(train::job_schema(), {arguments.config, arguments.overrides}, config);
  return config;
}

int64_t sequences_of(const train::JobConfig& config, int world_size) {
  const train::TrainingSettings& training = config.training;
  if (training.global_batch_size > 0) return training.global_batch_size;
  const auto& degrees = config.parallelism;
  const int64_t ranks_of_replica = std::max<int64_t>(degrees.tensor_parallel_degree, 1) *
                                   std::max<int64_t>(degrees.context.degree, 1) *
                                   std::max<int64_t>(degrees.pipeline_parallel_degree, 1);
  return training.local_batch_size * std::max<int64_t>(1, world_size / ranks_of_replica);
}

namespace {

// Otherwise it would outlive a run that was killed by minutes.
void end_with(pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent)
    throw ConfigError(
        str("titan plan: process ", parent, " of --for-run didn't start this one, or has ended"));
}

// The ranks of --calibrate on a CPU measure their links together, each in a process of its own.
void measure_links_command(const std::filesystem::path& file) {
  const dist::World world = dist::init({.device = "cpu"});
  const plan::ClusterSpec::Host host = plan::measure_links(world);
  if (world.rank() == 0)
    write_file_atomic(file, json{{"gb_per_s", host.gb_per_s},
                                 {"latency_us", host.latency_us},
                                 {"late_share", host.late_share},
                                 {"late_us", host.late_us}}
                                .dump());
}

plan::ClusterSpec::Host links_of_ranks(int num_ranks, const std::filesystem::path& file) {
  const int code = launch_local({.num_ranks = num_ranks,
                                 .command = {"/proc/self/exe", "plan", "--measure-links", file.string()},
                                 .log_rank = "none"});
  if (code != 0) throw Error(str("the ranks that measure their links ended with exit code ", code));
  const json found = json::parse(read_file(file));
  std::filesystem::remove(file);
  return {.devices = num_ranks,
          .gb_per_s = found.at("gb_per_s"),
          .latency_us = found.at("latency_us"),
          .late_share = found.at("late_share"),
          .late_us = found.at("late_us")};
}

plan::ClusterSpec calibrated(const PlanArguments& arguments, const plan::ClusterSpec& base) {
  const auto progress = [](const std::string& line) { std::cerr << line << std::endl; };
  const dist::DeviceBackend* const gpus = dist::open_cuda_plugin();
  const bool has_links = arguments.world_size > 1 && (gpus == nullptr || gpus->num_devices() == 0);
  plan::ClusterSpec::Host links;
  if (has_links) {
    // Before products start threads, which would take the launcher's signals.
    links = links_of_ranks(arguments.world_size, arguments.calibrate.string() + ".links");
    progress(str("gathers of ", arguments.world_size, " ranks: ", links.latency_us, " us a hop, ",
                 number("%.2f", plan::kHostLinkShare * links.gb_per_s), " GB/s into each rank, ",
                 std::round(100 * links.late_share), " % of the time between them late, at most ",
                 links.late_us, " us"));
  }
  plan::ClusterSpec cluster = plan::calibrate(base, arguments.world_size, progress);
  if (has_links) cluster.host = links;
  return cluster;
}

}  // namespace

int plan_command(const Arguments& words) {
  const PlanArguments arguments = parse_plan_arguments(words);
  if (arguments.for_run > 0) end_with(arguments.for_run);
  log::Settings settings = log::settings();
  settings.level = log::Level::Warning;
  log::configure(settings);
  if (!arguments.links.empty()) {
    measure_links_command(arguments.links);
    return 0;
  }
  if (arguments.search) return search_command(arguments);
  const plan::ClusterSpec cluster = plan::load_device(arguments.device);
  if (!arguments.calibrate.empty()) {
    write_file_atomic(arguments.calibrate, str("# Measured by titan plan --calibrate.\n",
                                               plan::to_toml(calibrated(arguments, cluster))));
    return print(str("written to ", arguments.calibrate.string(), "\n"));
  }
  // A plan computes little, and threads that wait for more of it take cores from the run.
  at::set_num_threads(1);
  // Before anything makes a tensor.
  plan::PlannedGpu& gpu = plan::PlannedGpu::open(cluster.device);
  const train::JobConfig config = load_planned_job(arguments);
  const train::PlanOptions options{.kernels = kernels_of(arguments.kernels),
                                   .with_spans = !arguments.timeline.empty() || !arguments.svg.empty()};
  const Plan plan{config, arguments, train::plan_job(config, arguments.world_size, cluster, gpu, options),
                  plan_notes(load_for_search(arguments))};
  if (!arguments.timeline.empty()) write_file_atomic(arguments.timeline, timeline_json(plan.job));
  if (!arguments.svg.empty()) write_file_atomic(arguments.svg, step_svg(plan.job, headline(plan)));
  const bool wants_changes = !plan.job.fits() && arguments.for_run == 0;
  // Printed now, because looking for changes may take a while.
  if (!arguments.json) {
    print(to_text(plan));
    std::fflush(stdout);
  }
  const std::vector<Change> changes = wants_changes ? changes_that_fit(plan, gpu) : std::vector<Change>();
  if (!arguments.json) return wants_changes ? print("\n" + changes_text(changes)) : 0;
  json object = to_json(plan);
  if (!plan.job.fits()) object["missing_gib"] = gib(plan.job.needed_bytes() - cluster.device.usable_bytes());
  if (wants_changes) object["changes_that_fit"] = changes_json(changes);
  return print(object.dump(1) + "\n");
}

}  // namespace titan::cli
