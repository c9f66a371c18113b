// Compares every schedule, with data, context and tensor parallelism and activation checkpointing, with the
// same model on one rank: the loss, the gradient norm, and every parameter's gradient. By default it runs
// enough combinations to cover each pair of settings, with --all also the full product of is_crossed(). The
// largest deviations are printed as JSON lines, which scripts/numerics.py collects.

#include <cstdio>
#include <iterator>
#include <map>

#include <gtest/gtest.h>

#include <set>

#include "distributed/pipeline_case.h"
#include "job/settings.h"
#include "train/pipeline/pipeline_runner.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names

// Each parameter counts on one stage.
void expect_all_counted(const std::vector<Parameter>& parameters, const train::Meshes& meshes,
                        const Outcome& reference, const std::string& what) {
  int64_t counted = 0;
  for (const Parameter& parameter : parameters) counted += parameter.duplicate ? 0 : 1;
  if (meshes.pp.size() > 1) counted = meshes.pp.group()->sum(counted, {.phase = "test::parameters"});
  EXPECT_EQ(counted, static_cast<int64_t>(reference.gradients.size())) << what;
}

// Runs two steps, so that leftovers of the first one are detected.
Outcome run_pipeline(const LlamaCase& llama, const Batch& batch, const Precision& precision,
                     const Variant& variant, const Outcome& reference) {
  const train::Meshes meshes = train::build_meshes(world(), variant.dims);
  Stages stages(llama, precision, variant, meshes, {.tensor = variant.tensor_options()});
  train::TiedHolders holders;
  if (llama.args.contains("tie_embeddings")) {
    const std::vector<int>& rank_of_stage = stages.schedule().rank_of_stage;
    const std::set<int> ranks = {rank_of_stage.front(), rank_of_stage.back()};
    holders["tok_embeddings.weight"].assign(ranks.begin(), ranks.end());
  }
  const train::TiedGradients tied(stages.parameters(), meshes.pp, holders);
  train::PipelineRunner runner(stages.stages(), meshes.pp, device());
  const auto micro_batches =
      micro_batches_of(batch.rows(meshes.dp_rank(), meshes.dp_degree()), variant.num_micro_batches());
  const train::StepPlan plan = runner.plan(
      stages.schedule(), boundaries_of(llama, precision, variant, micro_batches.front().input_BS.size(0)));
  double loss = 0;
  for (int step = 0; step < 2; ++step) {
    for (const Parameter& parameter : stages.parameters())
      at::Tensor(parameter.data.local).mutable_grad().reset();
    loss = runner.run(plan, micro_batches, batch.num_valid()).item<double>();
    tied.sum();
  }
  expect_all_counted(stages.parameters(), meshes, reference, name_of(variant));
  loss = meshes.loss.group()->sum(loss, {.phase = "test::loss"});
  Outcome outcome{loss, optim::clip_grad_norm(stages.parameters(), 1e30, meshes.pp).norm, {}};
  for (const Parameter& parameter : stages.parameters())
    outcome.gradients[parameter.name] = full_gradient(parameter).clone();
  return outcome;
}

// ---- cases

// Layouts by pp and by the layout of the other ranks; at most two layouts with 8 ranks.
std::vector<train::ParallelDims> all_dims(int size) {
  std::vector<train::ParallelDims> all;
  for (const int pp : {2, 4, 8}) {
    if (size % pp != 0) continue;
    const int rest = size / pp;
    for (const int replicate : {1, 2, 4})
      for (const int shard : {1, 2, 4})
        for (const int cp : {1, 2, 4})
          for (const int tp : {1, 2, 4})
            if (replicate * shard * cp * tp == rest)
              all.push_back(
                  {.dp_replicate = replicate, .dp_shard = shard, .rows = {{"cp", cp}}, .tp = tp, .pp = pp});
  }
  return all;
}

// More than two rounds of micro-batches if the schedule allows it, otherwise one round plus a micro-batch.
int odd_count(const pipeline::ScheduleTraits& traits, int pp, int stages) {
  return pipeline::counts_problem(traits, pp, stages, 2 * pp + 1) ? pp + 1 : 2 * pp + 1;
}

// The counts that a schedule allows among pp, 2 pp and an odd one, and each of them as half of an
// accumulation.
std::vector<Variant> variants_of_schedule(const pipeline::ScheduleTraits& traits,
                                          const train::ParallelDims& dims) {
  std::vector<Variant> variants;
  const bool one = traits.stages_per_rank == pipeline::StagesPerRank::One;
  const bool v = traits.stages_per_rank == pipeline::StagesPerRank::TwoInV;
  for (const int per_rank : one ? std::vector{1} : v ? std::vector{2} : std::vector{2, 3}) {
    const int stages = per_rank * dims.pp;
    for (const int micro_batches : {dims.pp, 2 * dims.pp, odd_count(traits, dims.pp, stages)})
      for (const int repeats : {1, 2})
        if (!pipeline::counts_problem(traits, dims.pp, stages, micro_batches))
          variants.push_back({dims, std::string(traits.name), stages, micro_batches, repeats});
  }
  return variants;
}

bool fits(const LlamaCase& llama, const Variant& variant) {
  const auto sizes = llama_spec().sizes(make_args(llama).get());
  std::vector<train::KeyedProblem> problems;
  train::check_divisibility(variant.dims, sizes, llama.seq_len, problems);
  if (has_documents(llama) && variant.dims.row_degree() > 1) return false;  // refused
  return problems.empty() && variant.stages <= sizes.num_layers + 2;
}

// All settings except checkpointing and the form of tensor parallelism.
std::vector<Variant> layouts_of(const LlamaCase& llama) {
  std::vector<Variant> layouts;
  for (const train::ParallelDims& dims : all_dims(world().size()))
    for (const pipeline::ScheduleTraits& traits : pipeline::all_schedule_traits())
      for (const Variant& variant : variants_of_schedule(traits, dims))
        if (fits(llama, variant)) layouts.push_back(variant);
  return layouts;
}

// A variant's settings, as numbers. Counts of micro-batches are distinguished by pp, so that every schedule
// is combined with all counts at each pp.
std::vector<int> settings_of(const Variant& variant) {
  const auto& [dims, schedule, stages, micro_batches, repeats, checkpointing, tensor] = variant;
  const auto* traits = &pipeline::schedule_traits(schedule);
  return {dims.dp_replicate + 10 * (dims.dp_shard + 10 * (dims.row_degree() + 10 * (dims.tp + 10 * dims.pp))),
          static_cast<int>(traits - pipeline::all_schedule_traits().data()),
          stages / dims.pp,
          100 * dims.pp + micro_batches,
          repeats,
          static_cast<int>(checkpointing),
          static_cast<int>(tensor)};
}

// With --all the first model runs this full product: every schedule at pp 2 and 4 with each count of
// micro-batches and each kind of checkpointing, combined with dp_shard 2, cp 2 and tp 2. HSDP, DDP, larger
// degrees, the forms of tensor parallelism and accumulation are combined with these, and with each other,
// only in pairs: all combinations would be 17,000 on 8 ranks.
bool is_crossed(const Variant& variant) {
  const train::ParallelDims& dims = variant.dims;
  return dims.pp <= 4 && dims.dp_replicate == 1 && dims.dp_shard <= 2 && dims.row_degree() <= 2 &&
         dims.tp <= 2 && variant.repeats == 1 && variant.tensor == 0;
}

// Covers the pairs of all settings in an order that mixes them, so that few cases are enough. `crossed` adds
// all variants of is_crossed().
std::vector<Variant> variants_of(const LlamaCase& llama, bool crossed) {
  constexpr size_t kKinds = std::size(kCheckpointing), kForms = std::size(kTensorForms);
  std::vector<Variant> all;
  PairwiseCover cover;
  const std::vector<Variant> layouts = layouts_of(llama);
  for (size_t shift = 0; shift < kKinds * kForms; ++shift) {
    for (size_t i = 0; i < layouts.size(); ++i) {
      Variant variant = layouts[i];
      if (variant.dims.tp == 1 && shift >= kKinds) continue;
      variant.checkpointing = (i + shift) % kKinds;
      if (variant.dims.tp > 1) variant.tensor = (i + shift / kKinds) % kForms;
      if (cover.add(settings_of(variant)) || (crossed && is_crossed(variant))) all.push_back(variant);
    }
  }
  TITAN_CHECK(!all.empty(), "'", llama.name, "' fits no pipeline of ", world().size(), " ranks");
  return all;
}

// ---- models

LlamaCase small(const std::string& name, std::map<std::string, config::Value> changes = {}) {
  LlamaCase llama = mini_llama();
  llama.name = name;
  llama.seq_len = 16;
  llama.args["n_layers"] = int64_t{7};
  llama.args["dim"] = int64_t{32};
  llama.args["n_kv_heads"] = int64_t{4};
  for (auto& [key, value] : changes) llama.args[key] = value;
  return llama;
}
// Two stages have no layer, the others one each, and the vocabulary can't be divided evenly.
LlamaCase shallow() {
  LlamaCase llama = small("shallow", {{"n_layers", int64_t{2}}, {"vocab_size", int64_t{251}}});
  llama.loss = "label_smoothing";
  return llama;
}
LlamaCase tied() {
  LlamaCase llama = small("tied", {{"tie_embeddings", true}});
  llama.loss = "z_loss";
  return llama;
}

struct PipelineCase {
  LlamaCase llama;
  Precision precision;
  bool crossed = false;  ///< with --all
};

class Pipeline : public ::testing::TestWithParam<PipelineCase> {};

TEST_P(Pipeline, EqualsOneRank) {
  auto [llama, precision, crossed] = GetParam();
  std::map<int64_t, Outcome> references;  // by rows
  Worst worst;
  const std::vector<Variant> variants = variants_of(llama, crossed && all_cases());
  for (const Variant& variant : variants) {
    if (world().rank() == 0 && worst.layouts > 0 && worst.layouts % 50 == 0)
      std::fprintf(stderr, "%s: %zu of %zu layouts\n", llama.name.c_str(), worst.layouts, variants.size());
    llama.rows = variant.dims.batch_degree() * variant.num_micro_batches();
    const Batch batch = random_batch(llama, 1);
    if (!references.contains(llama.rows)) references[llama.rows] = run_on_one_rank(llama, batch, precision);
    const Outcome& reference = references[llama.rows];
    expect_close(run_pipeline(llama, batch, precision, variant, reference), reference,
                 precision.dtype == at::kDouble ? 1e-10 : 1e-5, name_of(variant), worst);
  }
  worst.print("pipeline", llama.name, precision);
}

INSTANTIATE_TEST_SUITE_P(Models, Pipeline,
                         ::testing::Values(PipelineCase{small("pipelined"), kFloat64, /*crossed=*/true},
                                           PipelineCase{small("pipelined"), kFloat32},
                                           PipelineCase{shallow(), kFloat64}, PipelineCase{tied(), kFloat64},
                                           PipelineCase{small("documents", in_documents()), kFloat32}),
                         [](const auto& info) {
                           return info.param.llama.name + "_" + info.param.precision.name;
                         });

}  // namespace
}  // namespace titan
