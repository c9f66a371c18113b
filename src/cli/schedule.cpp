// titan schedule: draws a pipeline schedule and reports its time and its live activations, without a model.

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cli/parser.h"
#include "cli/text.h"
#include "core/file.h"
#include "titan/core/error.h"
#include "titan/parallel/pipeline_schedule.h"

namespace titan::cli {

namespace {

using namespace pipeline;

constexpr int kMostMicroBatches = 1 << 20;
constexpr size_t kMostPathEntries = 24;
constexpr size_t kMostDrawn = 50'000;       // actions in a drawing without --svg
constexpr int64_t kMostForwards = 1 << 22;  // a larger table is unreadable and may not fit in memory

/// `titan schedule --pp N --microbatches N [--schedule NAME] ...` or `titan schedule --from-csv FILE ...`
struct ScheduleArguments {
  std::string schedule = "1F1B";
  int num_ranks = 4;
  int num_stages = 0;  ///< 0: the fewest that the schedule allows
  int num_micro_batches = 8;
  int times = 1;
  bool list = false;
  bool forward_only = false;
  bool complete = false;
  bool first_contact = false;
  Costs costs;
  int max_live = 0;  ///< 0: no limit
  bool no_svg = false;
  std::filesystem::path from_csv, csv;  ///< empty: none
  std::filesystem::path svg;            ///< empty: schedule.svg in the current folder, if possible
};

constexpr const char* kScheduleNotes =
    R"(Prints what each pipeline rank does over time, the duration of the step, the bubble (the share of time that
ranks wait), the live activations of each rank (one per stage and micro-batch; from F to the end of B or W,
from F to the end of B or I, from I to W) and the critical path.

2F5 is stage 2's forward of micro-batch 5; B the backward, or I (input gradients) and W (weight
gradients). Costs are in any unit; B costs I + W. A list of costs has one value per stage. Schedules:
GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV.
CSV files are TorchTitan's: a row per rank, a cell per action.
)";

void add_costs(Parser& parser, Costs& costs) {
  const auto per_stage = [&parser](const char* name, std::vector<double>& values, const char* text) {
    parser.value(name, values, "T[,T...]", text)
        ->delimiter(',')
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->allow_extra_args(false);
  };
  per_stage("--forward", costs.forward, "time of an F (default 1)");
  per_stage("--input", costs.input, "time of an I (default 1)");
  per_stage("--weight", costs.weight, "time of a W (default 1)");
  parser.value("--communication", costs.communication, "T", "time of a message between ranks (default 0)");
  parser.value("--loss", costs.loss, "T", "time of the loss, added to the last stage's F (default 0)");
}

ScheduleArguments parse_schedule_arguments(const Arguments& words) {
  ScheduleArguments arguments;
  Parser parser("titan schedule", "[--schedule NAME] [--pp N] [--microbatches N] [options]", kScheduleNotes);
  const CLI::Range ranks(1, kMostRanks), micro_batches(1, kMostMicroBatches);
  parser.value("--schedule", arguments.schedule, "NAME",
               "the schedule's name, in upper or lower case (default 1F1B)");
  parser.number("--pp", arguments.num_ranks, ranks, "pipeline ranks (default 4)");
  parser.number("--microbatches", arguments.num_micro_batches, micro_batches,
                "micro-batches of a step (default 8)");
  parser.number("--stages", arguments.num_stages, ranks,
                "total number of stages (default: one per rank, or two if the schedule needs several)");
  parser.number("--times", arguments.times, micro_batches,
                "repeat the schedule N times, as in gradient accumulation");
  parser.flag("--forward-only", arguments.forward_only,
              "only the forwards, as in validation, on the schedule's stages");
  parser.flag("--complete", arguments.complete, "add sends, receives and parameter actions, as a run does");
  parser.flag(
      "--first-contact", arguments.first_contact,
      "refuse a schedule that hangs where ranks connect at their first message, as NCCL's do (titan train "
      "connects them before)");
  parser.flag("--list", arguments.list,
              "print a table of all schedules for --pp and --microbatches, and stop");
  add_costs(parser, arguments.costs);
  parser.file("--from-csv", arguments.from_csv, "read the schedule and its counts from a file");
  parser.file("--csv", arguments.csv, "write the schedule to a file");
  parser.file("--svg", arguments.svg, "draw the timeline to this file (default schedule.svg)");
  parser.app.add_flag("--no-svg", arguments.no_svg, "draw no timeline")->excludes("--svg");
  parser.number("--max-live", arguments.max_live, micro_batches,
                "refuse a schedule in which a rank holds more live activations, counted per stage");
  const auto exclude = [&](const char* option, std::initializer_list<const char*> others) {
    for (const char* other : others) parser.app.get_option(option)->excludes(parser.app.get_option(other));
  };
  exclude("--max-live", {"--forward-only", "--list"});
  exclude("--first-contact", {"--list"});
  exclude("--from-csv", {"--schedule", "--pp", "--microbatches", "--stages", "--forward-only", "--list"});
  parser.parse(words);
  return arguments;
}

std::string percent(double fraction) { return number("%.1f %%", 100 * std::max(0.0, fraction)); }

void check_size(int64_t num_stages, int64_t num_micro_batches) {
  if (num_stages * num_micro_batches > kMostForwards)
    throw ConfigError(str("titan schedule: ", num_micro_batches, " micro-batches of ", num_stages,
                          " stages are too many: at most ", kMostForwards, " forwards are allowed"));
}

Schedule make(const ScheduleArguments& arguments) {
  if (!arguments.from_csv.empty()) return read_schedule_csv(arguments.from_csv);
  const ScheduleTraits& traits = schedule_traits(arguments.schedule);
  const int num_stages =
      arguments.num_stages > 0 ? arguments.num_stages : default_num_stages(traits, arguments.num_ranks);
  check_size(num_stages, arguments.num_micro_batches);
  if (arguments.forward_only) {
    if (auto problem = stages_problem(traits, arguments.num_ranks, num_stages)) throw ConfigError(*problem);
    return make_forward_only_schedule(stage_map(traits, arguments.num_ranks, num_stages),
                                      arguments.num_micro_batches);
  }
  return make_schedule(arguments.schedule, arguments.num_ranks, num_stages, arguments.num_micro_batches);
}

std::string title_of(const Schedule& schedule) {
  return str(schedule.name, ": ", plural(schedule.num_ranks(), "rank"), ", ",
             plural(schedule.num_stages, "stage"), ", ", schedule.num_micro_batches,
             schedule.num_micro_batches == 1 ? " micro-batch" : " micro-batches");
}

// Colors only on a terminal; NO_COLOR turns them off (https://no-color.org).
TableStyle table_style() {
  if (!isatty(STDOUT_FILENO)) return {};
  TableStyle style{.colors = std::getenv("NO_COLOR") == nullptr};
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) style.width = size.ws_col;
  return style;
}

// Leaves out the middle of a long path.
std::string path_text(const Simulation& simulation) {
  const auto& path = simulation.critical_path;
  std::string text;
  for (size_t i = 0; i < path.size(); ++i) {
    if (path.size() > kMostPathEntries && i == kMostPathEntries / 2) {
      text += str(" ... (", path.size() - kMostPathEntries, " more)");
      i += path.size() - kMostPathEntries;
    }
    text += " " + to_string(simulation.timeline[path[i].rank][path[i].index].action);
  }
  return text;
}

const char* stages_text(StagesPerRank stages) {
  if (stages == StagesPerRank::One) return "1";
  return stages == StagesPerRank::Several ? "2 or more, in a loop" : "2, in a V";
}

const char* rule_text(MicroBatchRule rule) {
  if (rule == MicroBatchRule::Any) return "any number";
  return rule == MicroBatchRule::AtLeastStages ? "at least the stages"
                                               : "a multiple of max(1, micro-batches / ranks)";
}

std::string list_row(const ScheduleTraits& traits, int num_ranks, int num_micro_batches, const Costs& costs) {
  const int num_stages = default_num_stages(traits, num_ranks);
  std::string bubble = "-", live = "-";
  if (!counts_problem(traits, num_ranks, num_stages, num_micro_batches)) {
    const Simulation simulation =
        simulate(make_schedule(traits.name, num_ranks, num_stages, num_micro_batches), costs);
    bubble = percent(simulation.bubble_fraction);
    // Counts micro-batches of all stages of a rank, so that schedules with one and with several stages
    // compare.
    live = number("%.3g", std::ranges::max(simulation.ranks, {}, &RankFigures::peak_live).peak_live /
                              (1.0 * num_stages / num_ranks));
  }
  return str("| ", traits.name, " | ", stages_text(traits.stages_per_rank), " | ",
             rule_text(traits.micro_batch_rule), " | ", traits.splits_backward ? "yes" : "no", " | ",
             traits.memory_grows ? "yes" : "no", " | ", bubble, " | ", live, " |\n");
}

// The stages of a rank: "0 4", or "0 4 .. 60" for a long list.
std::string stages_of(const Schedule& schedule, int rank) {
  std::vector<int> stages;
  for (int stage = 0; stage < schedule.num_stages; ++stage)
    if (schedule.rank_of_stage[stage] == rank) stages.push_back(stage);
  const bool all = stages.size() <= 3;
  std::string text;
  for (size_t i = 0; i < (all ? stages.size() : 2); ++i) text += str(i == 0 ? "" : " ", stages[i]);
  return all ? text : str(text, " .. ", stages.back());
}

// A line for each rank, and the critical path.
std::string figures(const Schedule& schedule, const Simulation& simulation) {
  TextTable table{.rows = {{"rank", "stages", "busy", "idle", "bubble", "live", "before I", "owed W"}},
                  .right = {true, false, true, true, true, true, true, true}};
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    const RankFigures& figures = simulation.ranks[rank];
    const double idle = simulation.makespan - figures.busy;
    table.rows.push_back(
        {std::to_string(rank), stages_of(schedule, rank), number("%.6g", figures.busy), number("%.4g", idle),
         percent(simulation.makespan > 0 ? idle / simulation.makespan : 0), std::to_string(figures.peak_live),
         std::to_string(figures.peak_before_input), std::to_string(figures.peak_owed_weight)});
  }
  return str("makespan ", number("%.6g", simulation.makespan), ", bubble ",
             percent(simulation.bubble_fraction), "\n\n", to_string(table),
             "\ncritical path:", path_text(simulation), "\n");
}

// All named schedules as a Markdown table. A dash means that the schedule does not allow these counts.
std::string list_of_schedules(int num_ranks, int num_micro_batches, const Costs& costs) {
  std::string text =
      str("| Schedule | Stages per rank | Micro-batches | Splits the backward | Memory grows with them | "
          "Bubble | "
          "Live activations |\n|---|---|---|---|---|---|---|\n");
  for (const ScheduleTraits& traits : all_schedule_traits())
    text += list_row(traits, num_ranks, num_micro_batches, costs);
  return text;
}

// Without --svg the drawing is optional: a failure is reported, and the command continues.
void draw(const ScheduleArguments& arguments, const Schedule& schedule, const Simulation& simulation) {
  const bool is_named = !arguments.svg.empty();
  const std::filesystem::path path = is_named ? arguments.svg : "schedule.svg";
  size_t num_actions = 0;
  for (const auto& actions : schedule.ranks) num_actions += actions.size();
  try {
    if (!is_named && num_actions > kMostDrawn)
      throw Error(str("it has ", num_actions, " actions; use --svg FILE to draw it anyway"));
    const std::string title = str(title_of(schedule), "; bubble ", percent(simulation.bubble_fraction));
    write_file_atomic(path, to_svg(schedule, simulation, title));
    std::fputs(str("wrote the timeline to ", path.string(), "\n").c_str(), stderr);
  } catch (const Error& error) {
    if (is_named) throw;
    std::fputs(str("cannot draw the timeline: ", error.what(), "\n").c_str(), stderr);
  }
}

}  // namespace

int schedule_command(const Arguments& words) {
  const ScheduleArguments arguments = parse_schedule_arguments(words);
  if (arguments.list) {
    check_size(2 * arguments.num_ranks, arguments.num_micro_batches);
    return print(list_of_schedules(arguments.num_ranks, arguments.num_micro_batches, arguments.costs));
  }
  Schedule schedule = make(arguments);
  check_size(schedule.num_stages, int64_t{schedule.num_micro_batches} * arguments.times);
  if (arguments.times > 1) schedule = repeat(schedule, arguments.times);
  const Purpose purpose = has_backward(schedule) ? Purpose::Training : Purpose::Evaluation;
  if (arguments.max_live > 0)
    check_schedule(schedule, {.purpose = purpose, .max_live_activations = arguments.max_live});
  if (arguments.first_contact)
    check_schedule(with_communication(schedule), {.purpose = purpose, .connects_at_first_message = true});
  if (arguments.complete) schedule = with_parameter_actions(with_communication(schedule));
  const Simulation simulation = simulate(schedule, arguments.costs);
  if (!arguments.csv.empty()) write_file_atomic(arguments.csv, to_csv(schedule));
  if (!arguments.no_svg) draw(arguments, schedule, simulation);
  return print(str(title_of(schedule), "\n\n", to_table(simulation, table_style()), "\n",
                   figures(schedule, simulation)));
}

}  // namespace titan::cli
