#include "train/policies/fault_tolerance.h"

#include <algorithm>

#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/json.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/collectives.h"
#include "titan/train/run_observer.h"
#include "train/policies/interruption.h"

namespace titan::train {

void describe(config::Table<FaultToleranceSettings>& table) {
  using Settings = FaultToleranceSettings;
  table.field("requeue_on", &Settings::requeue_on,
              "signals after which rank 0 puts the stopped SLURM job back into the queue (scontrol requeue); "
              "use [\"SIGUSR1\"] with sbatch --signal=USR1@300. See docs/operations.md",
              config::one_of({"SIGTERM", "SIGINT", "SIGUSR1"}));
  table.field("on_nonfinite", &Settings::on_nonfinite,
              "when a loss or the gradient norm isn't finite: \"stop\" the run, or \"skip\" the optimizer's "
              "step on all ranks and continue with the next batch",
              config::one_of({"stop", "skip"}));
  table.field("max_nonfinite_in_a_row", &Settings::max_nonfinite_in_a_row,
              "maximum number of consecutive skipped steps; one more stops the run", config::at_least(1));
  table.field("max_nonfinite_steps", &Settings::max_nonfinite_steps,
              "maximum number of skipped steps in the whole run; one more stops it", config::at_least(1));
  table.field("spike_sigma", &Settings::spike_sigma,
              "a loss more than this many standard deviations above the mean of the last spike_window "
              "losses is a spike: the run rewinds to a checkpoint before it and skips the data through the "
              "spike; 0: off. If on, the loss is read at every step",
              config::finite_at_least(0));
  table.field("spike_window", &Settings::spike_window,
              "number of losses in the mean and deviation; no loss is a spike until the window is full",
              config::at_least(2));
  table.field(
      "spike_rewind_steps", &Settings::spike_rewind_steps,
      "minimum steps to rewind. If no checkpoint is old enough, half as many, and so on; twice as many if "
      "the next spike comes within spike_window steps",
      config::at_least(1));
  table.field("max_rewinds", &Settings::max_rewinds,
              "maximum number of rewinds in a run; one more spike stops it", config::at_least(1));
  table.field("check_replicas_freq", &Settings::check_replicas_freq,
              "steps between comparisons of the parameters that several ranks have a copy of; a difference "
              "stops the run and names the ranks. 0: off",
              config::at_least(0));

  const char* later = "replica groups that join and leave a run aren't supported yet";
  const char* on = "enable";
  table.refused(on, false, later);
  table.refused("process_group", std::string("gloo"), later, on, config::one_of({"gloo", "nccl"}));
  table.refused("process_group_timeout_ms", int64_t{10000}, later, on, config::at_least(1));
  table.refused("replica_id", int64_t{0}, later, on, config::at_least(0));
  table.refused("group_size", int64_t{0}, later, on, config::at_least(0));
  table.refused("min_replica_size", int64_t{1}, later, on, config::at_least(1));
  table.refused("semi_sync_method", {}, later);
  table.refused("sync_steps", int64_t{5}, later, on, config::at_least(1));
  table.refused("should_quantize", false, later, on);
  table.refused("fragment_sync_delay", int64_t{0}, later, on, config::at_least(0));
  table.refused("fragment_update_alpha", 0.0, later, on, config::in_range(0, 1));
  table.refused("module_fqns_per_model_fragment", config::StringList{}, later, on);
  table.refused("num_fragments", int64_t{1}, later, on, config::at_least(1));
}

namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Each trainer of a job has its own key, so that a request to stop one doesn't stop the next.
std::string next_key(const dist::World& world) {
  if (world.size() == 1) return "";
  return str("train/stop/", world.store().add(str("train/stops/", world.rank()), 1));
}

// A separate connection: a thread that waits on the shared one would block it for the others.
StorePtr open_store(const dist::World& world) {
  return world.size() == 1 ? StorePtr() : world.store().clone();
}

// Called by the signal watch's thread, whatever this rank is doing.
void publish_signal(const StorePtr& store, const std::string& key, int signal) {
  if (peer_has_failed())
    return log::info(str(signal_name(signal), ": another rank has failed, and the launcher ends this one"));
  log::warning(str(
      signal_name(signal),
      ": all ranks are asked to stop after the step in progress; another signal ends this process at once"));
  if (!store) return;
  try {
    store->set(key, signal_name(signal));
  } catch (const std::exception& error) {
    log::warning(
        str("the job's store doesn't answer, so ranks that wait for data don't learn of the signal: ",
            error.what()));
  }
}

}  // namespace

StopOnSignal::StopOnSignal(const dist::World& world)
    : world_(world),
      key_(next_key(world)),
      listener_(std::make_unique<SignalListener>(
          [store = open_store(world), key = key_](int signal) { publish_signal(store, key, signal); })) {}

StopOnSignal::~StopOnSignal() = default;

Vote StopOnSignal::vote() { return asked_by_peer_ || noted_signal() != 0 ? Vote::Stop : Vote::Go; }

bool StopOnSignal::gives_up_waiting() {
  constexpr int kCallsPerStoreCheck = 10;
  return noted_signal() != 0 || (++num_asked_ % kCallsPerStoreCheck == 0 && is_asked_by_peer());
}

bool StopOnSignal::is_asked_by_peer() {
  if (!key_.empty()) asked_by_peer_ = asked_by_peer_ || world_.store().check({key_});
  return asked_by_peer_;
}

std::optional<StopCause> StopOnSignal::stop_cause() {
  constexpr int kSignalBits = 128;
  constexpr dist::Label kLabel{"train::stop_cause"};
  const int signal = noted_signal();
  const double mine = signal == 0 ? 0 : (world_.size() - world_.rank()) * kSignalBits + signal;
  const auto everyone = world_.everyone();
  const auto largest = static_cast<int>(everyone->max(mine, kLabel));
  const bool by_launcher = everyone->max(noted_by_launcher() ? 1 : 0, kLabel) > 0;
  if (largest == 0) return std::nullopt;
  StopCause cause{.signal = largest % kSignalBits,
                  .rank = world_.size() - largest / kSignalBits,
                  .by_launcher = by_launcher};
  cause.reason = str(signal_name(cause.signal), " on rank ", cause.rank);
  return cause;
}

bool NonFiniteSteps::skip(const std::string& problem, const std::function<std::string()>& explain) {
  if (settings_.on_nonfinite != "skip") return false;
  ++total_;
  ++in_a_row_;
  const auto check = [&](int64_t count, int64_t most, const char* key, const char* what) {
    if (count > most)
      throw UnsoundRun(str(problem, ". The optimizer step was not taken, and as it is number ", count, " ",
                           what, ", the run stops: fault_tolerance.", key, " = ", most, explain()));
  };
  check(in_a_row_, settings_.max_nonfinite_in_a_row, "max_nonfinite_in_a_row", "in a row");
  check(total_, settings_.max_nonfinite_steps, "max_nonfinite_steps", "of this run");
  log::warning_rank0(str(problem, ". The optimizer step is skipped: number ", in_a_row_, " in a row, number ",
                         total_, " of this run"));
  return true;
}

void NonFiniteSteps::judge(Trainer& /*trainer*/, const StepValues& /*values*/) { in_a_row_ = 0; }

std::string NonFiniteSteps::why_not_save() const {
  return in_a_row_ == 0
             ? ""
             : str("it is non-finite step number ", in_a_row_, " in a row; the next finite step is saved");
}

void NonFiniteSteps::add_metrics(StepMetrics& metrics) const {
  if (settings_.on_nonfinite == "skip") metrics.skipped_steps = total_;
}

std::string NonFiniteSteps::state() const {
  return nlohmann::json{{"total", total_}, {"in_a_row", in_a_row_}}.dump();
}

void NonFiniteSteps::load(const std::string& state) {
  const auto tree = parse_json(state);
  const auto total = json_count(tree, "total"), in_a_row = json_count(tree, "in_a_row");
  TITAN_CHECK(total && in_a_row, "the counts 'total' and 'in_a_row' of non-finite steps are missing");
  total_ = std::max(total_, *total);
  in_a_row_ = *in_a_row;
}

}  // namespace titan::train
