#include "titan/train/refused_settings.h"

namespace titan::train {

namespace {

using config::StringList;
using std::string;

}  // namespace

void describe(config::Table<ProfilingSettings>& table) {
  const char* reason = "traces and memory snapshots come later";
  table.refused("enable_profiling", false, reason);
  table.refused("save_traces_folder", string("profile_traces"), reason);
  table.refused("profile_freq", int64_t{10}, reason);
  table.refused("profiler_active", int64_t{1}, reason);
  table.refused("profiler_warmup", int64_t{3}, reason);
  table.refused("enable_memory_snapshot", false, reason);
  table.refused("save_memory_snapshot_folder", string("memory_snapshot"), reason);
}

void describe(config::Table<ActivationCheckpointSettings>& table) {
  // TorchTitan's default is "selective"; ours is "none" until there is something to select.
  const char* reason = "activation checkpointing comes later: set activation_checkpoint.mode = \"none\"";
  table.refused("mode", string("none"), reason);
  table.refused("selective_ac_option", string("2"), reason);
  table.refused("per_op_sac_force_recompute_mm_shapes_by_fqns", StringList{"moe.router.gate"}, reason);
  table.refused("early_stop", false, reason);
  table.refused("memory_budget", 0.5, "belongs to a compiler's partitioner; there is none");
  table.refused("visualize_memory_budget_pareto", false, "belongs to a compiler's partitioner; there is none");
  table.refused("preserve_rng_state", true, reason);
  table.refused("determinism_check", string("default"), reason);
  table.refused("debug", false, reason);
}

void describe(config::Table<CompileSettings>& table) {
  const char* reason = "there is no compiler: fused operations are written out";
  table.refused("enable", false, reason);
  table.refused("components", StringList{"model", "loss"}, reason);
  table.refused("backend", string("inductor"), reason);
}

void describe(config::Table<QuantizeSettings>& table) {
  const char* float8 = "float8 training comes later";
  table.refused("linear.float8.enable_fsdp_float8_all_gather", false, float8);
  table.refused("linear.float8.precompute_float8_dynamic_scale_for_fsdp", false, float8);
  table.refused("linear.float8.recipe_name", {}, float8);
  table.refused("linear.float8.filter_fqns", StringList{}, float8);
  table.refused("linear.float8.emulate", false, float8);
  const char* mx = "microscaling formats come later";
  table.refused("linear.mx.mxfp8_dim1_cast_kernel_choice", string("triton"), mx);
  table.refused("linear.mx.recipe_name", string("mxfp8_cublas"), mx);
  table.refused("linear.mx.filter_fqns", StringList{"output"}, mx);
  const char* experts = "there are no mixture-of-experts models yet";
  table.refused("grouped_mm.float8.fqns", StringList{}, experts);
  table.refused("grouped_mm.mx.recipe_name", string("mxfp8"), experts);
  table.refused("grouped_mm.mx.fqns", StringList{}, experts);
}

void describe(config::Table<MemoryEstimationSettings>& table) {
  table.refused("enable", false, "dry runs come later");
  table.refused("disable_fake_mode", false, "dry runs come later");
}

void describe(config::Table<FaultToleranceSettings>& table) {
  const char* reason = "replica groups that come and go come later";
  table.refused("enable", false, reason);
  table.refused("process_group", string("gloo"), reason);
  table.refused("process_group_timeout_ms", int64_t{10000}, reason);
  table.refused("replica_id", int64_t{0}, reason);
  table.refused("group_size", int64_t{0}, reason);
  table.refused("min_replica_size", int64_t{1}, reason);
  table.refused("semi_sync_method", {}, reason);
  table.refused("sync_steps", int64_t{5}, reason);
  table.refused("should_quantize", false, reason);
  table.refused("fragment_sync_delay", int64_t{0}, reason);
  table.refused("fragment_update_alpha", 0.0, reason);
  table.refused("module_fqns_per_model_fragment", StringList{}, reason);
  table.refused("num_fragments", int64_t{1}, reason);
}

}  // namespace titan::train
