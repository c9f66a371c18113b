// titan plan: what a job takes on any number of GPUs, from a rehearsal of one rank of each role.

#include <algorithm>
#include <map>
#include <utility>

#include <nlohmann/json.hpp>

#include "cli/text.h"
#include "cli/train.h"
#include "core/units.h"
#include "job/job_config.h"
#include "job/rehearsal.h"
#include "plan/device_file.h"
#include "plan/summary.h"
#include "titan/config/load.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::cli {

namespace {

using nlohmann::json;
using plan::Category;

constexpr size_t kMostRows = 12;  // in a table of modules or operations

struct PlannedRole {
  train::PlannedRank rank;
  plan::Summary summary;

  std::string stream_name(int64_t stream) const {
    if (stream == 0) return "default";
    for (const auto& [number, name] : rank.streams)
      if (number == stream) return name;
    return str("stream ", stream);
  }
};

double gib(int64_t bytes) { return static_cast<double>(bytes) / kGiB; }
std::string gib_text(int64_t bytes) { return number("%.2f", gib(bytes)); }

train::JobConfig load_planned_job(const PlanArguments& arguments) {
  train::JobConfig config;
  config::Origins origins =
      config::load(train::job_schema(), {arguments.config, arguments.overrides}, config);
  if (config.training.device == "cpu")
    throw ConfigError(
        origins.problem("training.device", "a plan is for the GPU of --device; leave it at \"auto\""));
  config.training.device = "cuda";
  train::check_job(config, origins, arguments.world_size, train::JobFiles::Ignore);
  train::check_plannable(config, origins);
  return config;
}

bool are_alike(const PlannedRole& a, const PlannedRole& b) {
  return a.rank.peak_allocated_bytes == b.rank.peak_allocated_bytes &&
         a.rank.peak_reserved_bytes == b.rank.peak_reserved_bytes &&
         a.summary.num_launches == b.summary.num_launches && a.summary.flops == b.summary.flops &&
         a.summary.collectives.size() == b.summary.collectives.size();
}

std::vector<PlannedRole> plan_roles(const train::JobConfig& config, int world_size, plan::PlannedGpu& gpu) {
  std::vector<PlannedRole> roles;
  for (const train::Role& role : train::roles_of(config, world_size)) {
    train::PlannedRank rank = train::rehearse(config, world_size, role, gpu);
    plan::Summary summary = plan::summarize(*rank.trace);
    rank.trace.reset();  // a long list, of which the summary has what is shown
    roles.push_back({std::move(rank), std::move(summary)});
  }
  // The last rank is one of its own only if it does something else than the first of its pipeline rank.
  if (roles.back().rank.role.is_last && are_alike(roles[roles.size() - 2], roles.back())) roles.pop_back();
  if (roles.size() == 1) roles[0].rank.role.name = "every rank";
  return roles;
}

const PlannedRole& largest_of(const std::vector<PlannedRole>& roles) {
  return *std::ranges::max_element(roles, {},
                                   [](const PlannedRole& role) { return role.rank.peak_reserved_bytes; });
}

struct Plan {
  const train::JobConfig& config;
  const PlanArguments& arguments;
  const plan::DeviceSpec& device;
  std::vector<PlannedRole> roles;

  int64_t peak_bytes() const { return largest_of(roles).rank.peak_reserved_bytes; }
  bool fits() const { return peak_bytes() <= device.usable_bytes(); }
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

json memory_json(const PlannedRole& role) {
  json modules = json::array(), over_time = json::array();
  for (const plan::NamedAmount& owner : role.summary.peak_by_module)
    modules.push_back({{"module", owner.name}, {"bytes", owner.bytes}});
  for (const plan::MemoryPoint& point : role.summary.over_time) over_time.push_back(point_json(point));
  return {{"role", role.rank.role.name},
          {"rank", role.rank.role.rank},
          {"peak_gib", gib(role.rank.peak_reserved_bytes)},
          {"peak_reserved_bytes", role.rank.peak_reserved_bytes},
          {"peak_allocated_bytes", role.rank.peak_allocated_bytes},
          {"at_peak", point_json(role.summary.peak)},
          {"at_peak_by_module", modules},
          {"over_time", over_time}};
}

json step_json(const PlannedRole& role) {
  return {{"role", role.rank.role.name},
          {"rank", role.rank.role.rank},
          {"launches", role.summary.num_launches},
          {"allocations", role.summary.num_allocations},
          {"flops", role.summary.flops}};
}

void add_collectives(const PlannedRole& role, json& rows) {
  for (const plan::CollectiveTotals& totals : role.summary.collectives)
    rows.push_back({{"role", role.rank.role.name},
                    {"op", totals.op},
                    {"group", totals.group},
                    {"group_size", totals.group_size},
                    {"label", totals.label},
                    {"stream", role.stream_name(totals.stream)},
                    {"calls", totals.calls},
                    {"bytes", totals.bytes}});
}

void add_operations(const PlannedRole& role, json& rows) {
  for (const plan::LaunchTotals& totals : role.summary.launches)
    rows.push_back({{"role", role.rank.role.name},
                    {"operation", totals.name},
                    {"launches", totals.launches},
                    {"flops", totals.flops},
                    {"bytes_read", totals.bytes_read},
                    {"bytes_written", totals.bytes_written}});
}

json to_json(const Plan& plan) {
  json memory = {{"peak_gib", gib(plan.peak_bytes())},
                 {"usable_gib", gib(plan.device.usable_bytes())},
                 {"by_role", json::array()}};
  json steps = json::array(), collectives = json::array(), operations = json::array();
  for (const PlannedRole& role : plan.roles) {
    memory["by_role"].push_back(memory_json(role));
    steps.push_back(step_json(role));
    add_collectives(role, collectives);
    add_operations(role, operations);
  }
  return {{"model", plan.config.model_title()},
          {"world", plan.arguments.world_size},
          {"device", plan.device.name},
          {"fits", plan.fits()},
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
  for (const PlannedRole& role : plan.roles) {
    std::vector<std::string> row = {role.rank.role.name, gib_text(role.rank.peak_reserved_bytes),
                                    gib_text(role.rank.peak_allocated_bytes)};
    for (const int64_t bytes : role.summary.peak.bytes) row.push_back(gib_text(bytes));
    table.rows.push_back(std::move(row));
  }
  return to_string(table);
}

std::string modules_table(const PlannedRole& role) {
  TextTable table{{{"allocated in", "GiB at the peak"}}, {false, true}};
  for (const plan::NamedAmount& owner : role.summary.peak_by_module) {
    if (table.rows.size() > kMostRows) break;
    table.rows.push_back({owner.name.empty() ? "(no module)" : owner.name, gib_text(owner.bytes)});
  }
  return to_string(table);
}

std::string collectives_table(const PlannedRole& role) {
  if (role.summary.collectives.empty()) return "no collectives\n";
  TextTable table{{{"collective", "group", "ranks", "stream", "calls", "GiB"}},
                  {false, false, true, false, true, true}};
  for (const plan::CollectiveTotals& totals : role.summary.collectives)
    table.rows.push_back({totals.label.empty() ? totals.op : totals.label + " (" + totals.op + ")",
                          totals.group, str(totals.group_size), role.stream_name(totals.stream),
                          str(totals.calls), gib_text(totals.bytes)});
  return to_string(table);
}

std::string operations_table(const PlannedRole& role) {
  std::vector<plan::LaunchTotals> largest = role.summary.launches;
  std::ranges::stable_sort(largest, std::greater<>(), [](const plan::LaunchTotals& totals) {
    return std::pair(totals.flops, totals.bytes_read + totals.bytes_written);
  });
  TextTable table{{{"operation", "launches", "TFLOP", "GiB read", "GiB written"}},
                  {false, true, true, true, true}};
  for (const plan::LaunchTotals& totals : largest) {
    if (table.rows.size() > kMostRows) break;
    table.rows.push_back(
        {totals.name, str(totals.launches), totals.flops > 0 ? number("%.2f", 1e-12 * totals.flops) : "",
         number("%.2f", totals.bytes_read / kGiB), number("%.2f", totals.bytes_written / kGiB)});
  }
  table.rows.push_back(
      {"all", str(role.summary.num_launches), number("%.2f", 1e-12 * role.summary.flops), "", ""});
  return to_string(table);
}

std::string to_text(const Plan& plan) {
  const PlannedRole& role = largest_of(plan.roles);
  const int64_t usable = plan.device.usable_bytes(), missing = plan.peak_bytes() - usable;
  const std::string verdict = plan.fits() ? str("fits: ", gib_text(plan.peak_bytes()), " of ",
                                                gib_text(usable), " GiB, without NCCL's buffers")
                                          : str("doesn't fit: ", gib_text(missing), " GiB more than the ",
                                                gib_text(usable), " GiB that there are");
  const std::string& module = role.summary.peak.module;
  return str(plan.config.model_title(), " on ", plan.arguments.world_size, " x ", plan.device.name, ": ",
             verdict, "\n\n", memory_table(plan), "\n",
             plan.roles.size() > 1 ? role.rank.role.name + " takes most; its" : "the", " peak is in ",
             module.empty() ? "no module" : module, "\n\n", modules_table(role), "\ncollectives of a step\n",
             collectives_table(role), "\nlaunches of a step\n", operations_table(role));
}

}  // namespace

int plan_command(const Arguments& words) {
  const PlanArguments arguments = parse_plan_arguments(words);
  log::Settings settings = log::settings();
  settings.level = log::Level::Warning;
  log::configure(settings);
  const plan::DeviceSpec device = plan::load_device(arguments.device);
  // Before anything makes a tensor.
  plan::PlannedGpu& gpu = plan::PlannedGpu::open(device);
  const train::JobConfig config = load_planned_job(arguments);
  const Plan plan{config, arguments, device, plan_roles(config, arguments.world_size, gpu)};
  return print(arguments.json ? to_json(plan).dump(1) + "\n" : to_text(plan));
}

}  // namespace titan::cli
