// titan plan --search: which layout trains a job fastest.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <iostream>
#include <optional>
#include <sstream>
#include <thread>

#include <ATen/Parallel.h>
#include <c10/util/StringUtil.h>
#include <nlohmann/json.hpp>

#include "cli/plan_command.h"
#include "cli/plan_workers.h"
#include "cli/text.h"
#include "core/file.h"
#include "core/process.h"
#include "core/units.h"
#include "dist/device_backend.h"
#include "job/plan_search.h"
#include "plan/device_file.h"
#include "titan/config/load.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::cli {

namespace {

using nlohmann::json;
using train::FoundLayout;
using train::Layout;
using train::PlanAnswer;

// As config::load takes it: without TOML's quotes and brackets.
std::string word_of(const Layout::Setting& setting) {
  std::string value;
  for (const char c : setting.value)
    if (c != '"' && c != '[' && c != ']') value.push_back(c);
  return str("--", setting.section, ".", setting.key, "=", value);
}

PlanArguments with_settings(PlanArguments arguments, const std::vector<Layout::Setting>& settings) {
  for (const Layout::Setting& setting : settings) arguments.overrides.push_back(word_of(setting));
  return arguments;
}

// Exchanges between tensor-parallel ranks may keep their buffers for the backward.
int64_t saved_bytes(const plan::Summary& summary) {
  const auto of = [&](plan::Category category) { return summary.at_backward[static_cast<size_t>(category)]; };
  return of(plan::Category::Activations) + of(plan::Category::Communication);
}

PlanAnswer answer(const PlanArguments& base, const plan::ClusterSpec& cluster,
                  const train::PlanRequest& request) {
  PlanArguments arguments = with_settings(base, request.settings);
  arguments.world_size = request.world;
  try {
    const train::JobConfig config = load_planned_job(arguments);
    const train::JobPlan plan = train::plan_job(config, request.world, cluster, plan::PlannedGpu::get(),
                                                {.kernels = kernels_of(arguments.kernels),
                                                 .only_first_rank = request.only_first_rank,
                                                 .stops_above = request.stops_above});
    if (plan.share_rehearsed < 1)
      return {.error = {}, .share_rehearsed = plan.share_rehearsed, .needed_bytes = plan.needed_bytes()};
    return {.error = {},
            .step_s = plan.step.seconds,
            .tokens = plan.tokens,
            .mfu = plan.mfu(),
            .parameters = static_cast<double>(config.spec().sizes(config.args()).num_params),
            .peak_bytes = plan.peak_bytes(),
            .needed_bytes = plan.needed_bytes(),
            .most_bytes = plan.largest().summary.most_bytes,
            .saved_bytes = saved_bytes(plan.largest().summary),
            .seconds = plan.busiest().seconds};
  } catch (const ConfigError& error) {
    return {.error = error.what()};
  } catch (const std::exception& error) {
    return {.error = error.what(), .has_failed = true};
  }
}

// ---- results

double tokens_per_s(const PlanAnswer& plan, int world) { return plan.tokens / plan.step_s / world; }

json to_json(const FoundLayout& found, const train::SearchOptions& options, int64_t layers) {
  const int world = options.world;
  const PlanAnswer& plan = found.plan;
  json time = json::object();
  for (int i = 0; i < plan::kNumActivities; ++i)
    time[name_of(static_cast<plan::Activity>(i))] = plan.seconds[static_cast<size_t>(i)];
  std::vector<std::string> settings;
  for (const Layout::Setting& setting : found.layout.settings(world, options.sequences, layers))
    settings.push_back(word_of(setting));
  return {{"layout", found.layout.text()},
          {"settings", settings},
          {"tensor_parallel_degree", found.layout.tensor},
          {"context_parallel_degree", found.layout.context},
          {"pipeline_parallel_degree", found.layout.pipeline},
          {"data_parallel_replicate_degree", found.layout.replicate},
          {"micro_batch", found.layout.micro_batch},
          {"step_s", plan.step_s},
          {"tokens_per_s_per_device", tokens_per_s(plan, world)},
          {"mfu", plan.mfu},
          {"peak_gib", static_cast<double>(plan.peak_bytes) / kGiB},
          {"needed_gib", static_cast<double>(plan.needed_bytes) / kGiB},
          {"estimate", {{"step_s", found.estimated_s}, {"needed_gib", found.estimated_bytes / kGiB}}},
          {"time", time}};
}

json to_json(const train::SearchResult::Unplanned& unplanned) {
  return {{"layouts", unplanned.num}, {"last", unplanned.last}};
}

/// "Its step is 120 ms longer: exposed_communication +150 ms, compute -30 ms."
std::string why_it_loses(const FoundLayout& best, const FoundLayout& second, bool by_memory) {
  if (by_memory)
    return str("The second one (", second.layout.text(), ") takes ",
               number("%.2f", static_cast<double>(second.plan.needed_bytes - best.plan.needed_bytes) / kGiB),
               " GiB more.");
  struct Part {
    std::string name;
    double seconds;
  };
  std::vector<Part> parts;
  for (size_t i = 0; i < plan::kNumActivities; ++i)
    parts.push_back({name_of(static_cast<plan::Activity>(i)), second.plan.seconds[i] - best.plan.seconds[i]});
  std::ranges::sort(parts, std::greater<>(), [](const Part& part) { return std::abs(part.seconds); });
  std::string text;
  for (Part& part : parts) {
    if (std::abs(part.seconds) < 0.05e-3) continue;
    std::ranges::replace(part.name, '_', ' ');
    text += str(text.empty() ? "" : ", ", part.name, part.seconds > 0 ? " +" : " -",
                number("%.1f", 1e3 * std::abs(part.seconds)), " ms");
  }
  return str("The second one (", second.layout.text(), ") takes ",
             number("%.1f", 1e3 * (second.plan.step_s - best.plan.step_s)), " ms more for a step",
             text.empty() ? "" : ": ", text, ".");
}

std::string to_text(const train::SearchResult& result, int world, bool by_memory) {
  TextTable table{{{"", "layout", "tokens/s/device", "MFU %", "step", "GiB", "compute", "exposed", "bubble"}},
                  {true, false, true, true, true, true, true, true, true}};
  const auto percent = [](const PlanAnswer& plan, plan::Activity activity) {
    return number("%.0f %%", 100 * plan.seconds[static_cast<size_t>(activity)] / plan.step_s);
  };
  for (size_t i = 0; i < result.best.size(); ++i) {
    const PlanAnswer& plan = result.best[i].plan;
    table.rows.push_back(
        {str(i + 1), result.best[i].layout.text(), short_number(std::round(tokens_per_s(plan, world))),
         number("%.1f", 100 * plan.mfu), duration(plan.step_s),
         number("%.1f", static_cast<double>(plan.needed_bytes) / kGiB),
         percent(plan, plan::Activity::Compute), percent(plan, plan::Activity::ExposedCommunication),
         percent(plan, plan::Activity::Bubble)});
  }
  std::string text = to_string(table);
  if (result.best.size() > 1) text += "\n" + why_it_loses(result.best[0], result.best[1], by_memory) + "\n";
  return text;
}

std::string time_limit_text(const train::SearchResult& result, const train::SearchOptions& options) {
  if (!result.time_is_up) return "";
  return str("The search left out ", result.num_left,
             " layouts that may be among the best, because too little of its ", options.seconds,
             " s was left to plan them (--seconds allows more time).\n");
}

// Without --output: here, named by what was searched for, like llama3_405b_512xh100.toml.
std::filesystem::path output_of(const PlanArguments& arguments) {
  if (!arguments.output.empty()) return arguments.output;
  const std::filesystem::path device = arguments.device;
  const std::string config = arguments.config.empty() ? "plan" : arguments.config.stem().string();
  return str(config, "_", arguments.world_size, "x", device.stem().string(), ".toml");
}

void write_config(const PlanArguments& arguments, const Layout& layout, int64_t sequences, int64_t layers) {
  const PlanArguments chosen =
      with_settings(arguments, layout.settings(arguments.world_size, sequences, layers));
  train::JobConfig config;
  config::load(train::job_schema(), {chosen.config, chosen.overrides}, config);
  write_file_atomic(
      output_of(arguments),
      str("# The layout that titan plan --search chose for ", arguments.world_size, " x ", arguments.device,
          ": ", layout.text(), "\n\n", config::print_toml(train::job_schema(), config)));
}

// Degrees that the command line names stay; throws ConfigError if it names another setting that a search chooses.
void keep_named_degrees(const std::vector<std::string>& words, const train::JobConfig& base,
                        train::SearchOptions& options) {
  const train::ParallelismSettings& degrees = base.parallelism;
  if (config::override_value(words, "model.converters")) options.may_use_float8 = false;
  // 0 is "auto".
  const auto keep = [&](int64_t& given, int64_t degree, int64_t most, const std::string& key,
                        const std::string& option) {
    if (degree > most)
      throw ConfigError(str("titan plan: ", key, " = ", degree, " is more than the ", most,
                            option.empty() ? " devices" : str(" that the search may use (", option, ")")));
    if (degree > 0 && options.world % degree != 0)
      throw ConfigError(
          str("titan plan: ", key, " = ", degree, " doesn't divide the ", options.world, " devices"));
    given = degree;
  };
  const auto is_named = [&](const char* key) { return config::override_value(words, key).has_value(); };
  options.may_change_context = !is_named("parallelism.context_parallel_attention") &&
                               !is_named("parallelism.context_parallel_rotate_method");
  options.may_gather_float8 = !is_named("quantize.linear.float8.enable_fsdp_float8_all_gather") &&
                              !is_named("quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp");
  std::vector<std::string> chosen;
  for (const Layout::Setting& setting :
       Layout{.pipeline = 2, .schedule = "", .recompute = "op", .asynchronous = true}.settings(
           /*world=*/2, 1, 2)) {
    const std::string key = setting.section + "." + setting.key;
    if (setting.section == "training" || !config::override_value(words, key)) continue;
    if (setting.key == "tensor_parallel_degree")
      keep(options.tensor, degrees.tensor_parallel_degree, options.max_tensor, key, "--max-tp");
    else if (setting.key == "context_parallel_degree")
      keep(options.context, degrees.context.degree, options.max_context, key, "--max-cp");
    else if (setting.key == "pipeline_parallel_degree")
      keep(options.pipeline, degrees.pipeline_parallel_degree, options.max_pipeline, key, "--max-pp");
    else if (setting.key == "data_parallel_replicate_degree")
      keep(options.replicate, degrees.data_parallel_replicate_degree, options.world, key, "");
    else
      chosen.push_back(key);
  }
  if (!chosen.empty())
    throw ConfigError(str("titan plan: --search chooses ", c10::Join(", ", chosen),
                          " itself: leave it out. It keeps to degrees of tensor, context and pipeline "
                          "parallelism and of replicas"));
}

struct Search {
  train::JobConfig base;
  train::SearchOptions options;
  train::SearchResult result;
};

// Each worker has a planned GPU of its own; this process makes no tensor before they are there.
Search search(const PlanArguments& arguments, const plan::ClusterSpec& cluster,
              const std::function<void(train::SearchOptions&, const train::JobConfig&)>& narrow,
              const std::function<void(const std::string&)>& progress) {
  const auto open = [&]() -> PlanWorkers::Answer {
    at::set_num_threads(1);  // the few numbers of a plan aren't worth the threads that wait for each other
    plan::PlannedGpu::open(cluster.device);
    return [&](const train::PlanRequest& request) {
      const auto start = std::chrono::steady_clock::now();
      PlanAnswer result = answer(arguments, cluster, request);
      result.planning_s = seconds_since(start);
      return result;
    };
  };
  const auto num_workers = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
  PlanWorkers workers(num_workers, open);
  Search found{.base = load_for_search(arguments), .options = {}, .result = {}};
  const train::ParallelismSettings& parallelism = found.base.parallelism;
  for (const auto& [is_set, key] :
       {std::pair(!parallelism.pipeline_parallel_schedule_csv.empty(), "pipeline_parallel_schedule_csv"),
        std::pair(parallelism.module_fqns_per_model_part.has_value(), "module_fqns_per_model_part")})
    if (is_set)
      throw ConfigError(
          str("parallelism.", key,
              " is set, but a search for degrees chooses the pipeline's schedule and stages itself: "
              "leave it out, or set all degrees"));
  const int64_t num_layers = found.base.spec().sizes(found.base.args()).num_layers;
  const auto limit = [](int64_t given, int64_t otherwise) { return given > 0 ? given : otherwise; };
  found.options = {.world = arguments.world_size,
                   .sequences = limit(arguments.sequences, sequences_of(found.base, arguments.world_size)),
                   .usable_bytes = cluster.device.usable_bytes(),
                   .host_devices = cluster.host.devices,
                   .max_tensor = limit(arguments.max_tensor, cluster.host.devices),
                   .max_context = limit(arguments.max_context, cluster.host.devices),
                   .max_pipeline = limit(arguments.max_pipeline, num_layers),
                   .may_use_float8 = arguments.search_float8 && cluster.device.tflops.contains("float8"),
                   .least_memory = arguments.least_memory,
                   .num_at_once = static_cast<size_t>(num_workers),
                   .seconds = static_cast<double>(arguments.search_seconds)};
  // A job that multiplies in 8 bits already keeps its own way.
  if (!found.base.model.converters.empty()) found.options.may_use_float8 = false;
  narrow(found.options, found.base);
  found.result = train::search_layouts(
      found.base, found.options,
      [&](const train::NextRequest& next, const train::TakeAnswer& take) { workers.plan(next, take); },
      progress);
  const train::SearchResult& result = found.result;
  if (result.best.empty() && result.time_is_up)
    throw ConfigError(str("the limit of ", found.options.seconds, " s ended the search when ",
                          result.num_planned, " layouts were planned, of which none fits",
                          unplanned_text(result), "; --seconds of titan plan allows more time"));
  if (result.best.empty()) {
    const auto gib = [](double bytes) { return number("%.1f", bytes / kGiB) + " GiB"; };
    const auto& [smallest, bytes, is_least] = result.smallest;
    const auto usable = static_cast<double>(found.options.usable_bytes);
    throw ConfigError(str(bytes > 0
                              ? str("no layout fits into ", gib(usable), ": the smallest that was found (",
                                    smallest.text(), ") takes ", is_least ? "at least " : "about ",
                                    gib(bytes), ", ", gib(bytes - usable), " too much")
                              : "no layout can be planned",
                          unplanned_text(result)));
  }
  return found;
}

// ---- degrees of titan train

/// The name of this machine's first GPU, as the driver's files say; "" without one.
std::string name_of_gpu() {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", ignored)) {
    std::istringstream lines(read_file(entry.path() / "information"));
    for (std::string line; std::getline(lines, line);)
      if (const size_t at = line.find_first_not_of(" \t", 6);
          line.starts_with("Model:") && at != std::string::npos)
        return line.substr(at);
  }
  return "";
}

std::string device_here(const train::JobConfig& config) {
  if (config.training.device == "cpu" || !dist::gpu_visible()) return "cpu";
  const std::string name = name_of_gpu();
  if (const auto known = plan::device_called(name)) return *known;
  log::warning(str("the degrees are planned for an H100: there is no device file for ",
                   name.empty() ? "this GPU" : name));
  return "h100";
}

}  // namespace

std::vector<std::string> choose_degrees(const TrainArguments& arguments, const train::JobConfig& config) {
  const std::string device = device_here(config);
  PlanArguments request;
  request.config = arguments.config;
  request.overrides = arguments.overrides;
  // A plan takes a GPU's branches, also for a CPU.
  request.overrides.emplace_back("--training.device=auto");
  request.world_size = arguments.num_ranks;
  plan::ClusterSpec cluster = plan::load_device(device);
  std::string of_each;
  if (device == "cpu") {
    cluster.host.devices = std::max<int64_t>(cluster.host.devices, arguments.num_ranks);
    cluster.device.memory_gib = machine_memory_gib() / arguments.num_ranks;
    of_each = str(", with ", number("%.1f", cluster.device.memory_gib),
                  " GiB of this machine's memory each and the speeds of configs/devices/cpu.toml");
  }
  constexpr double limit_s = 60, progress_every_s = 10;
  log::info(str("looking for the degrees that are \"auto\" with titan plan, for at most ", limit_s, " s"));
  const Search found = search(
      request, cluster,
      [](train::SearchOptions& options, const train::JobConfig& base) {
        options.only_degrees = true;
        options.may_use_float8 = false;
        options.tensor = base.parallelism.tensor_parallel_degree;
        options.context = base.parallelism.context.degree;
        options.pipeline = base.parallelism.pipeline_parallel_degree;
        options.replicate = base.parallelism.data_parallel_replicate_degree;
        options.shard = std::max<int64_t>(base.parallelism.data_parallel_shard_degree, 0);
        options.num_best = 4;
        options.seconds = limit_s;
      },
      [last = std::chrono::steady_clock::now()](const std::string& line) mutable {
        if (seconds_since(last) < progress_every_s) return;
        last = std::chrono::steady_clock::now();
        log::info("titan plan: " + line);
      });
  const FoundLayout& best = found.result.best[0];
  const std::string next_best =
      found.result.best.size() > 1 ? why_it_loses(best, found.result.best[1], false)
      : found.result.num_planned > 1
          ? str("None of the other ", found.result.num_planned - 1, " layouts that were planned fits.")
          : "No other layout was planned.";
  log::info(str("degrees by titan plan for ", arguments.num_ranks, " x ", cluster.device.name, of_each, ": ",
                best.layout.text(), "; a step of ", found.options.sequences, " sequences takes ",
                duration(best.plan.step_s), " by the plan. ", next_best, unplanned_text(found.result)));
  if (found.result.time_is_up)
    log::info(str("The limit of ", limit_s, " s ended the search before ", found.result.num_left,
                  " layouts that may be faster were planned"));
  for (const std::string& note : plan_notes(found.base)) log::info("titan plan: " + note);
  std::vector<std::string> words;
  for (const Layout::Setting& setting :
       best.layout.settings(arguments.num_ranks, found.options.sequences,
                            found.base.spec().sizes(found.base.args()).num_layers))
    words.push_back(word_of(setting));
  return words;
}

int search_command(const PlanArguments& arguments) {
  const plan::ClusterSpec cluster = plan::load_device(arguments.device);
  const Search found = search(
      arguments, cluster,
      [&](train::SearchOptions& options, const train::JobConfig& base) {
        keep_named_degrees(arguments.overrides, base, options);
      },
      [](const std::string& line) { std::cerr << line << std::endl; });
  const auto& [base, options, result] = found;
  const int64_t num_layers = base.spec().sizes(base.args()).num_layers;
  std::optional<std::string> file = output_of(arguments).string();
  std::string written = str("The best one's config is in ", *file, ".\n");
  try {
    write_config(arguments, result.best[0].layout, options.sequences, num_layers);
  } catch (const Error& error) {
    // Not what somebody asked for, and no reason to lose the search.
    if (!arguments.output.empty()) throw;
    file.reset();
    written = str("The best one's config is not written (--output names another file): ", error.what(), "\n");
  }
  if (!arguments.json) {
    return print(
        str(base.model_title(), " on ", arguments.world_size, " x ", cluster.device.name, ", ",
            options.sequences, " sequences a step: ", result.num_layouts, " layouts, ", result.num_estimated,
            " estimated, ", result.num_planned, " planned, ",
            result.num_too_large == 0 ? "all of which fit" : str(result.num_too_large, " of which don't fit"),
            unplanned_text(result), "\n", time_limit_text(result, options), lines_of(plan_notes(base)), "\n",
            to_text(result, arguments.world_size, arguments.least_memory), written));
  }
  json best = json::array();
  for (const FoundLayout& found : result.best) best.push_back(to_json(found, options, num_layers));
  json object{{"world", arguments.world_size},
              {"device", cluster.device.name},
              {"config", file ? json(*file) : json()},
              {"sequences", options.sequences},
              {"notes", plan_notes(base)},
              {"layouts", result.num_layouts},
              {"estimated", result.num_estimated},
              {"planned", result.num_planned},
              {"too_large", result.num_too_large},
              {"time_is_up", result.time_is_up},
              {"left", result.num_left},
              {"refused", to_json(result.refused)},
              {"failed", to_json(result.failed)},
              {"best", best}};
  if (result.best.size() > 1)
    object["why_the_second_loses"] = why_it_loses(result.best[0], result.best[1], arguments.least_memory);
  return print(object.dump(1) + "\n");
}

}  // namespace titan::cli
