#pragma once

// Pipeline schedules as values: the actions of each pipeline rank in one optimizer step, in order. A schedule
// is plain data without tensors. It is made by name or read from a file, completed with sends, receives and
// parameter actions, checked, simulated and printed, and run by train::PipelineRunner.
//
//   Schedule schedule = make_schedule("1F1B", /*num_ranks=*/4, /*num_stages=*/4, /*num_micro_batches=*/16);
//   schedule = with_parameter_actions(with_communication(schedule));
//   check_schedule(schedule);
//
// [Note: stages and ranks]
// A model is cut into stages 0 .. num_stages-1; a pipeline rank owns one or several. Loop-shaped schedules
// give rank r of p the stages r, r+p, r+2p, ...; V-shaped ones r and 2p-1-r.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace titan::pipeline {

/// One entry of a schedule. `micro_batch` is -1 for Unshard, Reshard and Reduce.
struct Action {
  enum class Kind : uint8_t {
    Forward,          ///< F: the stage on one micro-batch; the last stage computes the loss too
    Backward,         ///< B: all gradients
    BackwardInput,    ///< I: the gradient of the stage's input only; keeps operands of the weight gradients
    BackwardWeight,   ///< W: the weight gradients, from the operands that I kept
    SendForward,      ///< the stage's output to the next stage's rank
    ReceiveForward,   ///< the stage's input from the previous stage's rank
    SendBackward,     ///< the gradient of the stage's input to the previous stage's rank
    ReceiveBackward,  ///< the gradient of the stage's output from the next stage's rank
    Unshard,          ///< gathers the stage's parameters over the data-parallel ranks
    Reshard,          ///< frees them
    Reduce,           ///< sums the stage's gradients over the data-parallel ranks; after its last B or W
  };
  Kind kind = Kind::Forward;
  int stage = 0;
  int micro_batch = -1;
  friend bool operator==(const Action&, const Action&) = default;
};

/// F, B, I or W: an action that computes.
constexpr bool is_compute(Action::Kind kind) { return kind <= Action::Kind::BackwardWeight; }
/// A send or a receive.
constexpr bool is_communication(Action::Kind kind) {
  return kind >= Action::Kind::SendForward && kind <= Action::Kind::ReceiveBackward;
}
/// Unshard, Reshard or Reduce.
constexpr bool is_parameter_action(Action::Kind kind) { return kind >= Action::Kind::Unshard; }

/// "3F7", "0I2", "1SEND_F0", "2RECV_B5", "0UNSHARD", "0REDUCE_GRAD": TorchTitan's and PyTorch's notation.
std::string to_string(const Action& action);
std::ostream& operator<<(std::ostream& out, const Action& action);

struct Schedule {
  std::string name;
  int num_stages = 1;
  int num_micro_batches = 1;
  std::vector<int> rank_of_stage = {0};
  std::vector<std::vector<Action>> ranks;  ///< per pipeline rank

  int num_ranks() const { return static_cast<int>(ranks.size()); }
  friend bool operator==(const Schedule&, const Schedule&) = default;
};

/// Whether any action is a B, I or W; a schedule without them is for evaluation.
bool has_backward(const Schedule& schedule);
/// Whether any action is a send or a receive.
bool has_communication(const Schedule& schedule);

// Schedules by name. They hold compute actions (F, B, I, W) in PyTorch's order, checked against the files in
// tests/data/schedules. with_communication() and with_parameter_actions() add the rest.
//
//   GPipe                  all F, then all B (Huang et al. 2019)
//   1F1B                   one F, one B in turn (Narayanan et al. 2019, PipeDream-Flush)
//   Interleaved1F1B        the same over several stages per rank (Narayanan et al. 2021)
//   LoopedBFS              stage after stage, all micro-batches of one at a time (Lamy-Poirier 2022)
//   InterleavedZeroBubble  ZB1P: backward split, W fills the gaps (Qi et al. 2024, arXiv 2401.10241)
//   ZBVZeroBubble          ZB-V: the same on a V of two stages per rank (same paper, section 6)
//   DualPipeV              F of one direction with B of the other, on a V (DeepSeek-V3, arXiv 2412.19437)

enum class StagesPerRank {
  One,
  Several,  ///< two or more, in a loop
  TwoInV,   ///< exactly two: r and 2p-1-r
};

enum class MicroBatchRule {
  Any,
  AtLeastStages,
  WholeRounds,  ///< a multiple of max(1, micro-batches / ranks): rounds of equal size
};

struct ScheduleTraits {
  std::string_view name;  ///< as PyTorch writes it
  StagesPerRank stages_per_rank = StagesPerRank::One;
  bool splits_backward = false;  ///< has I and W
  /// Live activations grow with the micro-batches, so gradient accumulation should repeat() a short schedule.
  bool memory_grows = false;
  MicroBatchRule micro_batch_rule = MicroBatchRule::Any;
};

/// All schedules, in the order above.
const std::vector<ScheduleTraits>& all_schedule_traits();
std::vector<std::string> schedule_names();

/// Looks a schedule up by name, ignoring case. Throws ConfigError for an unknown name, with the nearest and
/// all known names.
const ScheduleTraits& schedule_traits(std::string_view name);

/// One stage per rank, or two where the schedule needs several.
int default_num_stages(const ScheduleTraits& traits, int num_ranks);

/// The reason why the schedule can't have this many stages, with valid numbers; none if it can.
std::optional<std::string> stages_problem(const ScheduleTraits& traits, int num_ranks, int num_stages);

/// The same for stages and micro-batches.
std::optional<std::string> counts_problem(const ScheduleTraits& traits, int num_ranks, int num_stages,
                                          int num_micro_batches);

/// Throws ConfigError for an unknown name and for counts that the schedule doesn't allow.
Schedule make_schedule(std::string_view name, int num_ranks, int num_stages, int num_micro_batches);

/// For evaluation: every F once, on any map of stages to ranks where every rank owns a stage. A rank runs the
/// latest of its stages that can run, so that few inputs wait.
Schedule make_forward_only_schedule(const std::vector<int>& rank_of_stage, int num_micro_batches);

/// Stage s on rank s % num_ranks.
std::vector<int> loop_stage_map(int num_ranks, int num_stages);
/// Back and forth: 0 .. p-1, p-1 .. 0, 0 .. p-1, ...
std::vector<int> v_stage_map(int num_ranks, int num_stages);
/// The map that the schedule's generator uses.
std::vector<int> stage_map(const ScheduleTraits& traits, int num_ranks, int num_stages);

/// The schedule repeated `times` times with renumbered micro-batches, for gradient accumulation that needs no
/// more memory than one pass. Only the last pass keeps its Reduce actions.
Schedule repeat(const Schedule& schedule, int times);

// Schedules as CSV files in TorchTitan's and PyTorch's format: a row per pipeline rank, a cell per action.
//
//   0F0,0F1,,,0B0,0B1        F, B, I, W with stage and micro-batch; an empty cell is a pause, ignored here
//   0UNSHARD,0F0,0SEND_F0    parameter actions and communication are allowed, too
//   (0F3;1B2)OVERLAP_F_B     an overlapped F and B, read as the F, then the B

/// Reads a schedule. The numbers of stages and micro-batches and the map of stages to ranks follow from the
/// cells. `file` is for messages and names the schedule. Throws ConfigError with file:line:column for each
/// cell that isn't an action, a stage on two ranks, and rows and stages without actions. Doesn't check
/// whether the schedule can run: check_schedule() does.
Schedule parse_schedule_csv(std::string_view text, const std::filesystem::path& file);

/// As above, from a file.
Schedule read_schedule_csv(const std::filesystem::path& file);

/// All actions, one row per rank. parse_schedule_csv() returns the same schedule, except for its name.
std::string to_csv(const Schedule& schedule);

// Checks whether a schedule can run. Time and memory grow linearly with its actions.

enum class Purpose {
  Training,    ///< every stage's F and its whole (B) or split (I and W) backward, once per micro-batch
  Evaluation,  ///< every F once and no backward
};

struct CheckOptions {
  Purpose purpose = Purpose::Training;
  /// A send blocks while this many earlier messages of its channel (directed pair of ranks) have no posted
  /// receive. With 0, each send blocks until its own receive is posted.
  int channel_capacity = 1;
  /// Whether the first send or receive of a channel blocks until the other rank comes to its own first one there, as NCCL's do on a
  /// communicator that has carried no message. Links that `Links::connect` makes have carried one, so their schedules need not pass this.
  bool connects_at_first_message = false;
  /// Limit per rank of micro-batches, counted per stage, between their F and the end of their B or W.
  int max_live_activations = std::numeric_limits<int>::max();
};

/// One problem and its place.
struct Problem {
  int rank = -1;      ///< -1: the whole schedule
  int position = -1;  ///< index in the rank's list; -1: the whole list
  std::string message;
};

/// "rank 1, action 7 (2B3): ..."; actions are counted from 0.
std::string to_string(const Problem& problem, const Schedule& schedule);

/// The problems that prevent the schedule from running; empty if it can run. Only the first of these kinds
/// that has problems is reported, with at most 20 problems:
///   1. actions of unknown kind, on a wrong rank, for a stage or micro-batch that doesn't exist, duplicate or
///      useless (a send within a rank)
///   2. missing actions; a backward neither whole nor split; some but not all sends and receives
///   3. on one rank: actions before their inputs; receives in a different order than their sends; parameters
///      used while not gathered, gathered twice or left gathered (if the schedule has Unshard or Reshard); a
///      Reduce missing or before the last backward (if it has any); too many live activations
///   4. deadlocks
std::vector<Problem> find_problems(const Schedule& schedule, const CheckOptions& options = {});

/// Throws ConfigError with the schedule's name and the problems of find_problems().
void check_schedule(const Schedule& schedule, const CheckOptions& options = {});

// From a schedule of compute actions to one that the runtime executes:
//   with_parameter_actions(with_communication(schedule))
//
// [Note: how the runtime executes actions]
// Every directed pair of ranks has one channel, first in, first out. A send is started after the action that
// made its tensor and waited for when its buffer is needed again. A receive is posted, with its own buffer,
// when the runtime reaches it, and waited for by the F, B or I that uses it. Stages of one rank pass tensors
// locally, without sends and receives. Unshard starts gathering; the stage's next F, B, I or W waits for it.

/// Adds a send after, and a receive before, every F, B and I whose neighbor is on another rank. On each
/// channel, receives are in the order of the sends. A receive is one compute action ahead of its use, so that
/// one message travels while the rank computes. It is earlier only if a message used earlier is sent after
/// it, or if ranks would deadlock otherwise. The result can run even if sends block until their receive is
/// posted (channel_capacity 0). A schedule with sends or receives is returned unchanged. Throws ConfigError
/// for a schedule that can't run (check_schedule()).
Schedule with_communication(const Schedule& schedule);

/// Adds Unshard and Reshard so that no rank has more than `max_gathered_stages` gathered stages. These are
/// always the stages that it needs next, so stages are gathered ahead of use; none is gathered at the end.
/// Adds one Reduce per stage after its last B or W, and after the send that follows it, because a peer waits
/// for the send. A schedule that has Unshard or Reshard keeps its own, and likewise for Reduce.
Schedule with_parameter_actions(const Schedule& schedule, int max_gathered_stages = 3);

// Messages of a schedule that can share one call, if the backend has such calls (NCCL's groups).

/// Whether two sends from one rank to another may share a call. Both ends must give the same answer.
using MayJoin = std::function<bool(const Action&, const Action&)>;

/// For each rank and action of a complete schedule: whether the action is a message that shares a call with
/// the next action. Messages share a call if they are adjacent, in the order of their channel, both where
/// they are sent and where they are received. If only the sends or only the receives are adjacent, they stay
/// separate, because a call ends with its last message and so would delay the first. This can't cause a
/// deadlock, because no action is between the messages on either side.
std::vector<std::vector<bool>> joined_with_next(const Schedule& schedule, const MayJoin& may_join);

// The time and the live activations of a schedule for given costs, without running it.
//
// [Note: the model]
// A rank runs its actions one after the other; only F, B (= I + W), I and W take time. A message to another
// rank takes `communication`, in parallel with all computation, from the time when it is sent and its receive
// is posted (without communication actions: when it is computed). Channels have no limit. Gathering and
// reducing parameters takes no time. Times are in the unit of the costs.

/// The first three have one value per stage, or one for all.
struct Costs {
  std::vector<double> forward = {1};
  std::vector<double> input = {1};   ///< I
  std::vector<double> weight = {1};  ///< W
  double communication = 0;          ///< one message
  double loss = 0;                   ///< the loss head and its backward, which run with the last stage's F
};

struct Interval {
  Action action;
  double start = 0, end = 0;
};

struct RankFigures {
  double busy = 0;
  double first_start = 0, last_end = 0;
  // Peaks over time; a stage's micro-batch counts as 1. `peak_before_input` counts activations of which I
  // frees a part; W needs the rest.
  int peak_live = 0;          ///< from F to the end of B or W
  int peak_before_input = 0;  ///< from F to the end of B or I
  int peak_owed_weight = 0;   ///< from the end of I to the end of W
};

/// An entry of Simulation::timeline.
struct PathEntry {
  int rank = 0, index = 0;
  friend bool operator==(const PathEntry&, const PathEntry&) = default;
};

struct Simulation {
  double makespan = 0;         ///< from 0 to the end of the last action
  double bubble_fraction = 0;  ///< idle fraction of num_ranks * makespan
  std::vector<RankFigures> ranks;
  std::vector<std::vector<Interval>> timeline;  ///< per rank: its F, B, I and W
  /// From an action that starts at 0 to the last one; none of them can be delayed without delaying the end.
  std::vector<PathEntry> critical_path;
};

/// Throws ConfigError for a schedule that can't run (check_schedule()), for costs below 0 or not finite, and
/// for lists of costs that are neither 1 nor num_stages long.
Simulation simulate(const Schedule& schedule, const Costs& costs = {});

// Simulated schedules for people to read: a table for the terminal, and a drawing for documents.

struct TableStyle {
  int width = 100;      ///< characters per line; longer tables continue in another block of lines
  bool colors = false;  ///< use ANSI sequences
};

/// Time from left to right, a row per rank: "2F5" where the action starts, "-" as long as it lasts, "." while
/// the rank waits. A slot is the shortest action's time. If that makes more than 400 slots, it is a 400th of
/// the whole, and shorter actions may be missing.
std::string to_table(const Simulation& simulation, const TableStyle& style = {});

/// A complete SVG file: a row per rank, a box per F, B, I and W with its micro-batch, darker for later stages
/// of the rank, a legend, a time axis, and `title` at the top.
std::string to_svg(const Schedule& schedule, const Simulation& simulation, const std::string& title);

}  // namespace titan::pipeline
