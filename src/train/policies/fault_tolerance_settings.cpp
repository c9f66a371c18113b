#include "train/policies/fault_tolerance_settings.h"

namespace titan::train {

namespace {

void describe_stops(config::Table<FaultToleranceSettings>& table) {
  table.field("requeue_on", &FaultToleranceSettings::requeue_on,
              "signals after which rank 0 puts the stopped SLURM job back into the queue (scontrol requeue); "
              "[\"SIGUSR1\"] goes with sbatch --signal=USR1@300. See docs/operations.md",
              config::one_of({"SIGTERM", "SIGINT", "SIGUSR1"}));
}

void describe_steps(config::Table<FaultToleranceSettings>& table) {
  table.field("on_nonfinite", &FaultToleranceSettings::on_nonfinite,
              "when a loss or the gradient norm isn't finite: \"stop\" the run, or \"skip\" the optimizer's "
              "step on all ranks and continue with the next batch",
              config::one_of({"stop", "skip"}));
  table.field("max_nonfinite_in_a_row", &FaultToleranceSettings::max_nonfinite_in_a_row,
              "steps skipped one after another, at most; the next one stops the run", config::at_least(1));
  table.field("max_nonfinite_steps", &FaultToleranceSettings::max_nonfinite_steps,
              "steps skipped in the whole run, at most; the next one stops it", config::at_least(1));
  table.field("spike_sigma", &FaultToleranceSettings::spike_sigma,
              "a loss that lies more than so many standard deviations above the mean of the last "
              "spike_window ones is a spike: the run rewinds to a checkpoint before it and skips the data "
              "through the spike; 0: no loss is one. The loss is then read at every step",
              config::finite_at_least(0));
  table.field("spike_window", &FaultToleranceSettings::spike_window,
              "losses that mean and deviation are of; nothing is a spike before there are as many",
              config::at_least(2));
  table.field(
      "spike_rewind_steps", &FaultToleranceSettings::spike_rewind_steps,
      "steps that the run goes back from a spike, at least, so that what led to it isn't gone back to; "
      "where no checkpoint is as old, half as many, and so on. Twice as many for a spike that comes "
      "within spike_window steps of one before",
      config::at_least(1));
  table.field("max_rewinds", &FaultToleranceSettings::max_rewinds,
              "how often a run goes back, at most; the next spike stops it", config::at_least(1));
  table.field("check_replicas_freq", &FaultToleranceSettings::check_replicas_freq,
              "steps from one comparison of the parameters that several ranks have a copy of to the next; a "
              "difference stops the run and names the ranks. 0: they aren't compared",
              config::at_least(0));
}

void describe_replica_groups(config::Table<FaultToleranceSettings>& table) {
  const char* later = "replica groups that come and go come later";
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

}  // namespace

void describe(config::Table<FaultToleranceSettings>& table) {
  describe_stops(table);
  describe_steps(table);
  describe_replica_groups(table);
}

}  // namespace titan::train
