#include "titan/train/activation_checkpoint_settings.h"

#include "titan/core/error.h"

namespace titan::train {

namespace {

// Every so many layers, or "op".
config::Constraint op_or_count() {
  return {"\"op\" or an integer >= 1 in quotes",
          [](const config::Value& value) {
            const auto& text = std::get<std::string>(value);
            const bool digits = !text.empty() && text.size() < 10 &&
                                text.find_first_not_of("0123456789") == std::string::npos;
            return text == "op" || (digits && text.find_first_not_of('0') != std::string::npos);
          },
          {"op"}};
}

LayersPolicy selective(const ActivationCheckpointSettings& settings) {
  if (settings.selective_ac_option == "op")
    return SelectiveOp{.recompute_products = settings.per_op_sac_force_recompute_mm_shapes_by_fqns};
  return SelectiveLayers{.n = std::stoll(settings.selective_ac_option)};
}

std::optional<LayersPolicy> policy_of(const ActivationCheckpointSettings& settings,
                                      std::shared_ptr<dist::Group> group) {
  if (settings.mode == "none") return std::nullopt;
  if (settings.mode == "full") return FullRecompute{};
  if (settings.mode == "selective") return selective(settings);
  if (settings.mode == "offload") return OffloadActivations{};
  TITAN_CHECK(settings.mode == "memory_budget", "activation_checkpoint.mode '", settings.mode, "'");
  return MemoryBudget{.bytes = settings.memory_budget_bytes.value_or(-1),
                      .fraction = settings.memory_budget,
                      .group = std::move(group),
                      .op = {.recompute_products = settings.per_op_sac_force_recompute_mm_shapes_by_fqns}};
}

}  // namespace

void describe(config::Table<ActivationCheckpointSettings>& table) {
  using Settings = ActivationCheckpointSettings;
  table.field("mode", &Settings::mode,
              "what layers do with their activations between forward and backward: keep them, compute them "
              "again (all or a selection), move them to the host (GPUs only), or what fits into a budget",
              config::one_of({"none", "full", "selective", "offload", "memory_budget"}));
  table.field("selective_ac_option", &Settings::selective_ac_option,
              "with mode \"selective\": \"op\" keeps attention, reduce-scatters and every second product of "
              "each layer; a number n recomputes every n-th layer in full",
              op_or_count());
  table.field(
      "per_op_sac_force_recompute_mm_shapes_by_fqns", &Settings::per_op_sac_force_recompute_mm_shapes_by_fqns,
      "with \"op\": linear modules whose name contains one of these are computed again and not counted");
  table.field("early_stop", &Settings::early_stop,
              "a recomputation ends with the last tensor that the backward needs");
  table.field("preserve_rng_state", &Settings::preserve_rng_state,
              "a recomputation draws the random numbers that the forward drew");
  table.field("determinism_check", &Settings::determinism_check,
              "compare shapes and dtypes of what is computed again with the forward's",
              config::one_of({"default", "none"}));
  table.field(
      "memory_budget", &Settings::memory_budget,
      "with mode \"memory_budget\": bytes that layers may keep, on the way from full recomputation (0) "
      "to none (1)",
      config::in_range(0, 1));
  table.field(
      "memory_budget_bytes", &Settings::memory_budget_bytes,
      "the same in bytes of a rank: for one forward, or for all that a pipeline's schedule has under way "
      "at a time; overrides memory_budget",
      config::at_least(0));
  table.refused("visualize_memory_budget_pareto", false,
                "the choice that a memory budget leads to is printed as a table");
  table.refused(
      "debug", false,
      "there is no trace of operations to compare: a recomputation that differs names the module and "
      "the tensor");
}

ActivationCheckpoint activation_checkpoint(const ActivationCheckpointSettings& settings,
                                           std::shared_ptr<dist::Group> group) {
  return {.policy = policy_of(settings, std::move(group)),
          .options = {.early_stop = settings.early_stop,
                      .preserve_rng_state = settings.preserve_rng_state,
                      .check_recompute = settings.determinism_check != "none"}};
}

void apply_activation_checkpoint(const std::vector<nn::AnyRef>& layers,
                                 const ActivationCheckpoint& checkpoint, int64_t first_number) {
  if (checkpoint.policy) checkpoint_activations(layers, *checkpoint.policy, checkpoint.options, first_number);
}

}  // namespace titan::train
