#include "titan/train/refused_settings.h"

namespace titan::train {

namespace {

using config::StringList;
using std::string;

}  // namespace

void describe(config::Table<ProfilingSettings>& table) {
  const char* later = "traces and memory snapshots come later";
  const char* off = "read only where enable_profiling or enable_memory_snapshot is true";
  table.refused("enable_profiling", false, later);
  table.without_effect("save_traces_folder", string("profile_traces"), off);
  table.without_effect("profile_freq", int64_t{10}, off);
  table.without_effect("profiler_active", int64_t{1}, off);
  table.without_effect("profiler_warmup", int64_t{3}, off);
  table.refused("enable_memory_snapshot", false, later);
  table.without_effect("save_memory_snapshot_folder", string("memory_snapshot"), off);
}

void describe(config::Table<ActivationCheckpointSettings>& table) {
  // TorchTitan's default is "selective"; ours is "none" until there is something to select.
  const char* off = "read only where activation_checkpoint.mode isn't \"none\"";
  table.refused("mode", string("none"), "activation checkpointing comes later: set it to \"none\"");
  table.without_effect("selective_ac_option", string("2"), off);
  table.without_effect("per_op_sac_force_recompute_mm_shapes_by_fqns", StringList{"moe.router.gate"}, off);
  table.without_effect("early_stop", false, off);
  table.without_effect("memory_budget", 0.5, off);
  table.without_effect("visualize_memory_budget_pareto", false, off);
  table.without_effect("preserve_rng_state", true, off);
  table.without_effect("determinism_check", string("default"), off);
  table.without_effect("debug", false, off);
}

void describe(config::Table<CompileSettings>& table) {
  table.refused("enable", false, "there is no compiler: fused operations are written out");
  table.without_effect("components", StringList{"model", "loss"}, "read only where compile.enable is true");
  table.without_effect("backend", string("inductor"), "read only where compile.enable is true");
}

void describe(config::Table<QuantizeSettings>& table) {
  const char* off = "read only where model.converters names this recipe";
  table.without_effect("linear.float8.enable_fsdp_float8_all_gather", false, off);
  table.without_effect("linear.float8.precompute_float8_dynamic_scale_for_fsdp", false, off);
  table.without_effect("linear.float8.recipe_name", {}, off);
  table.without_effect("linear.float8.filter_fqns", StringList{}, off);
  table.without_effect("linear.float8.emulate", false, off);
  table.without_effect("linear.mx.mxfp8_dim1_cast_kernel_choice", string("triton"), off);
  table.without_effect("linear.mx.recipe_name", string("mxfp8_cublas"), off);
  table.without_effect("linear.mx.filter_fqns", StringList{"output"}, off);
  table.without_effect("grouped_mm.float8.fqns", StringList{}, off);
  table.without_effect("grouped_mm.mx.recipe_name", string("mxfp8"), off);
  table.without_effect("grouped_mm.mx.fqns", StringList{}, off);
}

void describe(config::Table<MemoryEstimationSettings>& table) {
  table.refused("enable", false, "dry runs come later");
  table.without_effect("disable_fake_mode", false, "read only where memory_estimation.enable is true");
}

void describe(config::Table<FaultToleranceSettings>& table) {
  const char* off = "read only where fault_tolerance.enable is true";
  table.refused("enable", false, "replica groups that come and go come later");
  table.without_effect("process_group", string("gloo"), off);
  table.without_effect("process_group_timeout_ms", int64_t{10000}, off);
  table.without_effect("replica_id", int64_t{0}, off);
  table.without_effect("group_size", int64_t{0}, off);
  table.without_effect("min_replica_size", int64_t{1}, off);
  table.refused("semi_sync_method", {}, "replica groups that come and go come later");
  table.without_effect("sync_steps", int64_t{5}, off);
  table.without_effect("should_quantize", false, off);
  table.without_effect("fragment_sync_delay", int64_t{0}, off);
  table.without_effect("fragment_update_alpha", 0.0, off);
  table.without_effect("module_fqns_per_model_fragment", StringList{}, off);
  table.without_effect("num_fragments", int64_t{1}, off);
}

}  // namespace titan::train
