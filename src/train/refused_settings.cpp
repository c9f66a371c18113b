#include "titan/train/refused_settings.h"

namespace titan::train {

namespace {

using config::StringList;
using std::string;

}  // namespace

void describe(config::Table<ProfilingSettings>& table) {
  const char* later = "traces and memory snapshots come later";
  const char* on = "enable_profiling";
  table.refused(on, false, later);
  table.refused("save_traces_folder", string("profile_traces"), later, on);
  table.refused("profile_freq", int64_t{10}, later, on, config::at_least(1));
  table.refused("profiler_active", int64_t{1}, later, on, config::at_least(1));
  table.refused("profiler_warmup", int64_t{3}, later, on, config::at_least(0));
  table.refused("enable_memory_snapshot", false, later);
  table.refused("save_memory_snapshot_folder", string("memory_snapshot"), later, "enable_memory_snapshot");
}

void describe(config::Table<CompileSettings>& table) {
  const char* none = "there is no compiler: fused operations are written out";
  table.refused("enable", false, none);
  table.refused("components", StringList{"model", "loss"}, none, "enable", config::one_of({"model", "loss"}));
  table.refused("backend", string("inductor"), none, "enable");
}

void describe(config::Table<QuantizeSettings>& table) {
  const char* later = "low-precision converters don't exist yet";
  const char* on = "model.converters";
  const auto mx_recipe = config::one_of({"mxfp8", "mxfp8_cublas", "mxfp8_cublas_rceil"});
  table.refused("linear.float8.enable_fsdp_float8_all_gather", false, later, on);
  table.refused("linear.float8.precompute_float8_dynamic_scale_for_fsdp", false, later, on);
  table.refused("linear.float8.recipe_name", {}, later, on,
                config::one_of({"tensorwise", "rowwise", "rowwise_with_gw_hp"}));
  table.refused("linear.float8.filter_fqns", StringList{}, later, on);
  table.refused("linear.float8.emulate", false, later, on);
  table.refused("linear.mx.mxfp8_dim1_cast_kernel_choice", string("triton"), later, on,
                config::one_of({"triton", "cuda", "torch"}));
  table.refused("linear.mx.recipe_name", string("mxfp8_cublas"), later, on, mx_recipe);
  table.refused("linear.mx.filter_fqns", StringList{"output"}, later, on);
  table.refused("grouped_mm.float8.fqns", StringList{}, later, on);
  table.refused("grouped_mm.mx.recipe_name", string("mxfp8"), later, on, mx_recipe);
  table.refused("grouped_mm.mx.fqns", StringList{}, later, on);
}

void describe(config::Table<MemoryEstimationSettings>& table) {
  table.refused("enable", false, "dry runs come later");
  table.refused("disable_fake_mode", false, "dry runs come later", "enable");
}

void describe(config::Table<FaultToleranceSettings>& table) {
  const char* later = "replica groups that come and go come later";
  const char* on = "enable";
  table.refused(on, false, later);
  table.refused("process_group", string("gloo"), later, on, config::one_of({"gloo", "nccl"}));
  table.refused("process_group_timeout_ms", int64_t{10000}, later, on, config::at_least(1));
  table.refused("replica_id", int64_t{0}, later, on, config::at_least(0));
  table.refused("group_size", int64_t{0}, later, on, config::at_least(0));
  table.refused("min_replica_size", int64_t{1}, later, on, config::at_least(1));
  table.refused("semi_sync_method", {}, later);
  table.refused("sync_steps", int64_t{5}, later, on, config::at_least(1));
  table.refused("should_quantize", false, later, on);
  table.refused("fragment_sync_delay", int64_t{0}, later, on, config::at_least(0));
  table.refused("fragment_update_alpha", 0.0, later, on, config::in_range(0, 1));
  table.refused("module_fqns_per_model_fragment", StringList{}, later, on);
  table.refused("num_fragments", int64_t{1}, later, on, config::at_least(1));
}

}  // namespace titan::train
